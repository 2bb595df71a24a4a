"""Which failures of CI's tests may be tried again: few, of a list of tests, in a run that ended as it should. And what
CI ends with: which tests were not run, and by which command they are.
"""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "try_again.py"
FLOW = "tests/calib/flow/test_automations.py::test_silence_is_told_and_a_success_is_no_silence"
NOT_RUN = ROOT / ".ci" / "not_run.py"
ENGINES = sorted((ROOT / "tests" / "engines").glob("test_*.py"))


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
        (log("tests/calib/flow/test_automations.py::test_the_dead_are_found_by_their_heartbeat"), "has no second try"),
        (log(f"{FLOW}_twice"), "has no second try"),
        (log(f"{FLOW}[$(id)]"), "has no second try"),
        (log(*(f"{FLOW}[{n}]" for n in range(3))), "3 tests failed"),
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


def test_what_is_listed_is_there_and_kills_nothing(script):
    for name in script.STEADY_ALONE:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text()
        found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert len(found) == 1, name
        body = ast.get_source_segment(text, found[0]) or ""
        assert "kill" not in body and "Thread" not in body, name


def test_a_worker_that_dies_or_a_test_that_hangs_ends_the_run_with_its_name():
    """pytest-xdist would replace the worker and wait for ever: what the Makefile and pyproject.toml ask for instead."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["faulthandler_exit_on_timeout"] and PATIENCE < settings["faulthandler_timeout"] <= 1800
    assert "--max-worker-restart=0" in (ROOT / "Makefile").read_text()


def said(folder: Path, *ran: str) -> list[str]:
    command = [sys.executable, NOT_RUN, folder, *ran]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def test_skips_are_told_by_their_reason_but_for_those_that_another_step_ran(tmp_path):
    lines = ["SKIPPED [1] tests/engines/test_a.py:16: vLLM is elsewhere: make test-engines", "12 passed in 3.1s",
             "SKIPPED [1] tests/engines/test_b.py:8: vLLM is elsewhere: make test-engines",
             "SKIPPED [1] tests/engines/test_c.py:8: LMCache is elsewhere: make test-lmcache"]  # fmt: skip
    (tmp_path / "tests.log").write_text("\n".join(lines))
    (tmp_path / "vLLM.log").write_text("SKIPPED [4] tests/support/b.py:77: no browser: make browser\n")
    assert said(tmp_path, "make test-lmcache") == [
        "=== not run here:",
        "  vLLM is elsewhere: make test-engines (2: tests/engines/test_a.py, tests/engines/test_b.py)",
        "  no browser: make browser (4: tests/support/b.py)",
    ]


def test_a_run_without_skips_says_so(tmp_path):
    (tmp_path / "tests.log").write_text("12 passed in 3.1s\n")
    assert said(tmp_path) == ["=== not run here:", "  nothing"]


def test_a_skip_of_pytest_has_the_form_that_is_read(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\npytest.importorskip('no_such', reason='it is not here: make x')"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-c", "/dev/null", "-p", "no:cacheprovider", "test_x.py"]
    log = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    (tmp_path / "tests.log").write_text(log)
    assert said(tmp_path)[1:] == ["  it is not here: make x (1: test_x.py)"], log


@pytest.mark.parametrize("file", ENGINES, ids=lambda file: file.stem)
def test_the_command_that_a_test_of_an_engine_names_runs_it(file):
    (target,) = re.findall(r'^pytest\.importorskip\(.*reason=".*: make ([a-z-]+)"\)$', file.read_text(), re.MULTILINE)
    rules = (ROOT / "Makefile").read_text().replace("$(ENGINES)", "tests/engines").replace("\\\n", "")
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", rules, re.MULTILINE)
    assert {f"tests/engines/{file.name}", "tests/engines"} & set(recipe.split())
