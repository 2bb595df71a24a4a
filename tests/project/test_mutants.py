"""The mutants of tests/mutants fit the code as it is, and each is a change."""

import ast
from pathlib import Path

from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]


def test_every_mutant_has_its_place_and_its_tests():
    names = [one.name for one in MUTANTS]
    assert len(names) == len(set(names)) and len(names) >= 40
    for one in MUTANTS:
        file = one.place(ROOT)
        assert one.before != one.after, one.name
        ast.parse(file.read_text().replace(one.before, one.after))
        assert one.tests and all((ROOT / "tests" / name).is_file() for name in one.tests), one.name
