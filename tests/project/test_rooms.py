"""The floor plan: a few modules at the root, rooms below, and imports without a circle, however they are written."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {
    "kvq_runtime": {"recipe", "geometry", "errors", "cache", "policy_setting", "families"},
    "kvq_calib": {"bench", "lm_eval"},
}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """module → the modules that it imports: at the top, inside functions, or for a type checker alone."""
    found = grimp.build_graph("kvq_runtime", "kvq_calib", "pipelines", cache_dir=None)
    return {module: set(found.find_modules_directly_imported_by(module)) for module in found.modules}


def test_no_circle_of_imports(graph):
    """Imports inside functions and under TYPE_CHECKING count: a circle that they hide is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", ROOTS)
def test_the_root_of_a_package_has_few_modules(package):
    assert {path.stem for path in (ROOT / package).glob("*.py")} == ROOTS[package] | {"__init__"}


def test_no_stage_is_asked_for_its_class():
    """Consumers ask the contract of `stages/stage.py`. Left out: recipe.py, which checks what it was given; recipes;
    and fit/, where a file is the fit of the stages of one file."""
    classes = "|".join(re.findall(r"^class (\w+)\(", "".join(p.read_text() for p in _stages()), re.M))
    ladder = re.compile(rf"isinstance\([^()]*\b({classes})\b|\.kind (?:==|in)\b")
    allowed = {ROOT / "kvq_runtime" / "recipe.py"}
    places = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("kvq_runtime", "kvq_calib")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path not in allowed and not {"recipes", "fit"} & set(path.parts)
        for line in path.read_text().splitlines()
        if ladder.search(line)
    ]
    assert not places, "\n".join(places)


def _stages() -> list[Path]:
    return [path for path in (ROOT / "kvq_runtime" / "stages").glob("*.py") if path.stem not in ("stage", "kinds")]
