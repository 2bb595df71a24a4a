"""What CI ends with: which tests were not run, and by which command they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "not_run.py"
ENGINES = sorted((ROOT / "tests" / "engines").glob("test_*.py"))


def said(folder: Path, *ran: str) -> list[str]:
    command = [sys.executable, SCRIPT, folder, *ran]
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
