"""Every exception that a user can cause has an exit code and a message of one line; defects keep their traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    assert (
        capsys.readouterr().err
        == "kvq-calibrate: ray is not installed; in a checkout of kvq: pip install -e '.[scale]'\n"
    )


@pytest.mark.parametrize("defect", [KeyError("x"), ModuleNotFoundError("x", name="kvq_runtime.x"), AssertionError()])
def test_a_defect_keeps_its_traceback(defect):
    with pytest.raises(type(defect)):
        exit_codes.run("kvq", failing(defect))


def test_a_process_ends_without_taking_its_modules_apart():
    """What others have registered is done, threads are waited for, and output stays; a defect is told."""
    body = """
import atexit, sys, threading, time
from kvq_runtime.cli import exit_codes
def command():
    atexit.register(lambda: print("at the end"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("waited for"))).start()
    sys.modules["kept"] = type("Kept", (), {"__del__": lambda self: print("taken apart")})()
    return int(sys.argv[1])
sys.exit(exit_codes.program("kvq", command))"""
    ended = subprocess.run([sys.executable, "-c", body, "3"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()) == (3, ["waited for", "at the end"])
    failed = subprocess.run([sys.executable, "-c", body, "x"], capture_output=True, text=True)
    assert failed.returncode == 1 and "ValueError" in failed.stderr and "taken apart" in failed.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_ends_nothing_and_its_number_is_no_file_s(closed, tmp_path):
    body = f"""
import os, sys
from kvq_runtime.cli import exit_codes
def command():
    with open({str(tmp_path / "made")!r}, "w") as file:
        print("out")
        exit_codes.say("kvq", "err")
        file.write(str(file.fileno() > 2 and not sys.stderr.isatty()))
    return 3
sys.exit(exit_codes.program("kvq", lambda: exit_codes.run("kvq", command)))"""
    run = ["bash", "-c", f'"$@" {closed}', "bash", sys.executable, "-c", body]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "made").read_text()) == (3, "True")
    assert done.stdout == "out\n" * (">&-" not in closed.split()) and "Traceback" not in done.stderr


def test_what_is_said_to_nobody_stops_no_work():
    body = """
import sys, time
from kvq_runtime.cli import exit_codes
def command():
    for _ in range(50):
        exit_codes.say("kvq", "at work")
        time.sleep(0.01)
    print("done")
    return 0
sys.exit(exit_codes.program("kvq", lambda: exit_codes.run("kvq", command)))"""
    with subprocess.Popen(
        [sys.executable, "-c", body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as begun:
        assert begun.stdout and begun.stderr and begun.stderr.readline() == "kvq: at work\n"
        begun.stderr.close()
        assert begun.stdout.read() == "done\n"
    assert begun.returncode == 0


def test_an_interrupt_ends_an_import_that_would_go_on(tmp_path):
    """Elsewhere it is an exception as ever, and in what is imported once a command's modules are loaded."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n pass"
    )
    body = """
import os, signal, sys
from kvq_runtime.cli import exit_codes
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
def command():
    if sys.argv[1] == "later":
        exit_codes.loaded()
    if sys.argv[1] != "work":
        import slow
    else:
        os.kill(os.getpid(), signal.SIGINT)
    return 0
sys.exit(exit_codes.program("kvq", lambda: exit_codes.run("kvq", command, interrupted="goes on")))"""
    early, swallowed = (130, "kvq: interrupted while modules were loaded\n"), (0, "")
    for where, said in {"import": early, "work": (130, "kvq: goes on\n"), "later": swallowed}.items():
        path = os.pathsep.join([str(tmp_path), *sys.path])
        ended = subprocess.run(
            [sys.executable, "-c", body, where], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert (ended.returncode, ended.stderr) == said


def test_a_command_that_a_program_calls_does_not_end_it():
    body = """
import sys
from kvq_runtime.cli.main import main
sys.argv = ["kvq", "recipes", "higgs-2bit"]
assert main() == 0
raise RuntimeError("goes on")"""
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.endswith("RuntimeError: goes on\n")


def test_the_page_of_commands_and_every_help_have_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    table = page.partition("| exit code | meaning |")[2].partition("\n\n")[0].replace("`", "")
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE))
    assert {int(code): text for code, text in rows.items()} == exit_codes.MEANINGS
    said = [" ".join(text.split()) for text in (exit_codes.EXIT_CODES, exit_codes.CALIBRATION_EXIT_CODES)]
    for code, text in exit_codes.MEANINGS.items():
        assert [f"{code} {text}" in one for one in said] == [code != 5, True]


ABSENT = [
    ["show", "nothing"],
    ["show", "nothing.safetensors"],
    ["show", "nothing@1.0.0", "--lock", "nothing.lock"],
    ["verify", "nothing", "--key", "nothing.pem"],
    ["history", "nothing"],
    ["promote", "nothing@1.0.0"],
    ["pull", "nothing", "--locked", "nothing.lock"],
    ["diff", "nothing", "nothing.safetensors"],
    ["list", "--registry", "/nowhere"],
    ["list", "/nowhere"],
    ["search", "--registry", "file:///nowhere"],
    ["doctor", "/nowhere"],
    ["gc", "/nowhere"],
    ["show", "nothing", "--registry", "/nowhere"],
    ["copy", "nothing", "/somewhere"],
    ["recipes", "aqua-9bit"],
    ["recipes", "nothing.json"],
    ["bytes", "aqua-9bit"],
    ["bytes", "aqua-2bit", "--model", "nothing"],
    ["eval", "higgs-2bit", "--model", "nothing"],
    ["eval", "nothing", "--model", "demo"],
    ["eval", "aqua-2bit", "--model", "demo"],
    ["eval", "nothing.safetensors", "--model", "demo"],
    ["eval", "higgs-2bit", "--model", "demo", "--corpus", "nothing.txt"],
    ["eval", "higgs-2bit", "--model", "demo", "--corpus", "wikitext-2:nothing.txt"],
    ["compare", "--recipes", "aqua-9bit", "--model", "demo"],
]


@pytest.mark.parametrize("given", ABSENT, ids=" ".join)
def test_what_is_named_and_is_not_there_is_3(given, kvq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = kvq(*given)
    said = ("nothing", "nowhere", "aqua-")
    assert code == 3 and not out and err.startswith("kvq: ") and any(word in err for word in said), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "more", [["--model", "nothing"], ["--model", "./nothing"], ["--recipe", "aqua-9bit"], ["--recipe", "nothing.json"],
             ["--corpus", "nothing.txt"], ["--baseline", "nothing"]], ids=" ".join
)  # fmt: skip
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_so_it_is_for_a_calibration(more, dry, capsys, tmp_path, monkeypatch):
    from kvq_calib.cli import calibrate

    monkeypatch.chdir(tmp_path)
    assert calibrate.main(["--model", "demo", "--samples", "8", "--seq-len", "256", *more, *dry]) == 3
    captured = capsys.readouterr()
    assert more[1].removeprefix("./") in captured.err and not captured.out
