"""The mutants of tests/mutants.py fit the code as it is."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_mutant_has_its_place_and_its_tests():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    names = [one.name for one in mutants.MUTANTS]
    assert len(names) == len(set(names)) and len(names) >= 40
    for one in mutants.MUTANTS:
        file, before, after = one.place(ROOT)
        assert file == ROOT / one.file and before != after
        assert len(mutants.paths(one, ROOT)) == len(one.tests), one.name
