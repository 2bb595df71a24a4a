"""Every exception that a user can cause has an exit code and a message of one line; defects keep their traceback."""

import pytest

from kvq_runtime.cli import exit_codes
from kvq_runtime.errors import ArtifactError, Conflict, NotFound

CODES = {
    ArtifactError("content: changed"): 1,
    NotFound("no artifact x"): 3,
    Conflict("moved"): 4,
    ValueError("version 'x'"): 2,
    OSError("no space left"): 1,
    RuntimeError("no answer"): 1,
}


def failing(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize("error", CODES, ids=lambda error: type(error).__name__)
def test_an_error_is_a_code_and_a_line(error, capsys):
    assert exit_codes.run("kvq", failing(error)) == exit_codes.exit_code(error) == CODES[error]
    assert capsys.readouterr().err == f"kvq: {error}\n"


def test_control_characters_of_a_message_are_escaped(capsys):
    assert exit_codes.run("kvq", failing(ValueError("\x1b[2Jgone"))) == 2
    assert capsys.readouterr().err == "kvq: \\x1b[2Jgone\n"


@pytest.mark.parametrize("text", [None, "the same command goes on"])
def test_an_interrupt_is_130(text, capsys):
    assert exit_codes.run("kvq", failing(KeyboardInterrupt()), interrupted=text) == 130
    assert capsys.readouterr().err == (f"kvq: {text}\n" if text else "")


def test_a_missing_extra_is_named(capsys):
    missing = ModuleNotFoundError("No module named 'ray'", name="ray")
    assert exit_codes.run("kvq-calibrate", failing(missing), extras="[scale]") == 1
    assert capsys.readouterr().err == "kvq-calibrate: ray is not installed: pip install 'kvq-runtime[scale]'\n"


@pytest.mark.parametrize("defect", [KeyError("x"), ModuleNotFoundError("x", name="kvq_runtime.x"), AssertionError()])
def test_a_defect_keeps_its_traceback(defect):
    with pytest.raises(type(defect)):
        exit_codes.run("kvq", failing(defect))
