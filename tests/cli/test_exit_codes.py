"""Every exception that a user can cause has an exit code and a message of one line; defects keep their traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvq_runtime.cli import exit_codes
from kvq_runtime.errors import ArtifactError, Conflict, NotFound

ROOT = Path(__file__).parents[2]
CODES = {ArtifactError("content: changed"): 1, NotFound("no artifact x"): 3, Conflict("moved"): 4,
         ValueError("version 'x'"): 2, OSError("no space left"): 1, RuntimeError("no answer"): 1}  # fmt: skip


def failing(error: BaseException):
    def command() -> int:
        raise error

    return command


def test_an_error_is_a_code_and_a_line_that_controls_no_terminal_and_tells_no_token(capsys):
    for error, code in CODES.items():
        assert exit_codes.run("kvq", failing(error)) == code
        assert capsys.readouterr().err == f"kvq: {error}\n"
    assert exit_codes.run("kvq", failing(ValueError("\x1b[2Jgone, hf_abcdefghijkl"))) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvq: \\x1b[2Jgone, ") and "abcdefghijkl" not in err


def test_an_interrupt_is_130(capsys):
    assert exit_codes.run("kvq", failing(KeyboardInterrupt("half"))) == 130
    assert capsys.readouterr().err == "kvq: half\n"


def test_a_missing_extra_is_named(capsys):
    for module, named in (("ray", "scale"), ("datasets", "calib")):
        assert exit_codes.run("kvq-calibrate", failing(ModuleNotFoundError(module, name=module))) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"kvq-calibrate: {module} is missing; ") and f"pip install -e '.[{named}]'" in err


def test_a_defect_keeps_its_traceback():
    for defect in (KeyError("x"), ModuleNotFoundError("x", name="kvq_runtime.x")):
        with pytest.raises(type(defect)):
            exit_codes.run("kvq", failing(defect))


def test_the_page_of_commands_has_the_same_table():
    page = (ROOT / "docs" / "commands.md").read_text()
    table = page.partition("| exit code | meaning |")[2].partition("\n\n")[0].replace("`", "")
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE))
    assert {int(code): text for code, text in rows.items()} == exit_codes.MEANINGS


def test_a_closed_pipe_is_no_error():
    """`kvq recipes | head -1` ends quietly."""
    command = f"{sys.executable} -m kvq_runtime.cli.main recipes --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[", "")


ABSENT = ["show nothing", "show nothing@1.0.0 --lock nothing.lock", "list --registry /nowhere", "copy nothing /nowhere",
          "recipes aqua-9bit", "bytes aqua-2bit --model nothing", "eval aqua-2bit --model demo",
          "eval higgs-2bit --model demo --corpus nothing.txt", "eval higgs-2bit --model demo --output nowhere/x",
          "compare --recipes aqua-9bit --model demo", "calibrate --model nothing",
          "calibrate --model demo --recipe aqua-9bit",
          "calibrate --model demo --corpus nothing.txt --dry-run"]  # fmt: skip


@pytest.mark.parametrize("given", ABSENT)
def test_a_missing_name_is_3(given, kvq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = kvq(*given.split())
    assert code == 3 and not out and any(word in err for word in ("nothing", "nowhere", "aqua-")), err
    assert err.splitlines()[-1].startswith("kvq")


@pytest.mark.parametrize("given", ["nonsense", "show a@../x", "list --registry hf://../x", "yank a@1.0.0",
                                   "history name@1.0.0", "promote name", "list --regsitry x", "report",
                                   "calibrate --model demo --max-perplexity-ratio 0.02"])  # fmt: skip
def test_a_wrong_command_line_is_2(given, kvq):
    code, out, err = kvq(*given.split())
    assert code == 2 and not out and err.count("\n") == 1 and "Traceback" not in err
