"""Which failures of CI's tests may be tried again: few, of a named folder, in a run that ended as it should."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "try_again.py"
FLOW = "tests/calib/flow/test_automations.py::test_silence_is_told_and_a_success_is_no_silence"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("try_again", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def log(*failed: str, code: int = 1, items: int = 30, counts: str = "", more: str = "") -> str:
    """What pytest and make write."""
    counts = counts or f"{len(failed)} failed, {items - len(failed) - 2} passed, 2 skipped"
    lines = [f"2 workers [{items} items]", "....F", more, *(f"FAILED {name} - assert 0" for name in failed)]
    lines += [f"===== {counts} in 61.10s (0:01:01) =====", f"make: *** [Makefile:45: test-all] Error {code}"]
    return "\n".join(lines)


def test_a_test_of_prefect_is_tried_again_without_its_group(script):
    assert script.tests_to_try(log(f"{FLOW}@prefect")) == [FLOW]
    assert script.tests_to_try(log(FLOW, counts="1 failed, 29 passed")) == [FLOW]


@pytest.mark.parametrize(
    "text, says",
    [
        (log("tests/registry/test_faults.py::test_killed_at_any_moment[pull]"), "has no second try"),
        (log(FLOW, "tests/registry/test_publishers.py::test_eight"), "test_eight has no second try"),
        (log(*(f"{FLOW}{n}" for n in range(3))), "3 tests failed"),
        (log(FLOW, counts="1 failed, 4 passed"), "5 of 30 tests ran"),
        (log(code=3, counts="5 passed"), "exit code 3"),
        (log(FLOW, code=2), "exit code 2"),
        (log(FLOW, more=f"worker 'gw1' crashed while running '{FLOW}'"), "a worker died"),
        (log(FLOW, counts="1 failed, 28 passed, 1 error"), "not every failure is named"),
        ("make: *** [Makefile:45: test-all] Error 1", "count of the tests"),
        ("", "exit code unknown"),
    ],
)
def test_nothing_else_is(script, text, says):
    with pytest.raises(ValueError, match=says):
        script.tests_to_try(text)
