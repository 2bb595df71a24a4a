"""What needs no tensor starts without the libraries that take seconds to import. A wrong command line is answered in a
line before.
"""

import json
import subprocess
import sys

import pytest
import tiny_artifact as tiny

from kvq_runtime.registry.resolve import open_registry

HEAVY = ["torch", "numpy", "transformers", "safetensors", "huggingface_hub", "datasets", "matplotlib", "prefect"]
BODY = f"""
import contextlib, io, json, sys
from {{module}} import main
found = {{{{}}}}
for given in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        code = main(given)
    found[" ".join(given)] = [code, [name for name in {HEAVY!r} if name in sys.modules], len(out.getvalue())]
print(json.dumps(found))
"""
WRONG = {
    ("promote",): "kvq promote: the following arguments are required: REFERENCE; kvq promote --help",
    ("list", "--regsitry", "x"): "kvq list: unrecognized arguments: --regsitry; did you mean --registry; kvq list",
    ("eval", "higgs-4bit", "--model", "dmeo"): "kvq: model 'dmeo' is no folder, no Hub id (org/name) and not in",
    ("compare", "--model", "demo", "--plot", "out.xyz"): "kvq compare: argument --plot: 'out.xyz'; pictures are",
    ("calibrate", "--model", "dmeo"): "kvq-calibrate: model 'dmeo' is no folder",
    ("calibrate", "--model", "demo", "--seq-len", "1"): "kvq-calibrate: argument --seq-len: '1'; use a whole number of",
    ("calibrate", "--max-perplexity-ratio", "0.02"): "kvq-calibrate: --max-perplexity-ratio 0.02: perplexity over",
}
ANSWER = """
import contextlib, io, json, sys
from kvq_runtime.cli.main import main
found = []
for given in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(given)
    found.append([code, err.getvalue(), [name for name in ("torch", "transformers") if name in sys.modules]])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "module, succeeding, wrong",
    [
        (
            "kvq_runtime.cli.main",
            [["--version"], ["--help"], ["recipes", "--help"], ["eval", "--help"]],
            [["lst"], ["list", "--regsitry", "x"], ["gc", "--grace", "soon"]],
        ),
        (
            "kvq_calib.cli.calibrate",
            [["--version"], ["--help"], ["--list-models"], ["--list-models", "--json"]],
            [["--modle", "x"], ["--samples", "many"]],
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(module, succeeding, wrong):
    command = [sys.executable, "-c", BODY.format(module=module), json.dumps([*succeeding, *wrong])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for given in [*succeeding, *wrong]:
        code, heavy, printed = found[" ".join(given)]
        assert not heavy, f"{module} {given} imports {heavy}"
        assert code == (0 if given in succeeding else 2) and bool(printed) == (given in succeeding), given


def test_what_reads_a_registrys_events_imports_no_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    store = open_registry()
    store.publish("tiny-2bit", tiny.data(0))
    store.publish("tiny-2bit", tiny.data(1))
    commands = [["list"], ["search"], ["history", "tiny-2bit"], ["promote", "tiny-2bit@1.0.0"]]
    commands += [
        ["promote", "tiny-2bit@1.0.1"],
        ["rollback", "tiny-2bit"],
        ["yank", "tiny-2bit@1.0.1", "--reason", "x"],
    ]
    command = [sys.executable, "-c", BODY.format(module="kvq_runtime.cli.main"), json.dumps(commands)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(found) == len(commands)
    for given, (code, heavy, printed) in found.items():
        assert code == 0 and not heavy and printed, (given, heavy)


def test_kvq_alone_is_short_a_wrong_command_has_a_guess_and_calibrate_is_one(kvq, capsys):
    from kvq_runtime.cli.main import main

    assert main([]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") < 16 and "kvq calibrate --model M" in err
    code, _, err = kvq("prmote", "x")
    assert code == 2 and err == "kvq: there is no command 'prmote'; did you mean kvq promote? kvq --help lists all\n"
    assert kvq("calibrate", "--version")[:2] == (0, kvq("--version")[1])


def test_what_is_wrong_is_said_in_a_line_without_torch():
    command = [sys.executable, "-c", ANSWER, json.dumps([list(given) for given in WRONG])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for (given, begins), (code, err, heavy) in zip(WRONG.items(), found, strict=True):
        assert code in (2, 3) and err.startswith(begins) and err.count("\n") == 1 and not heavy, (given, err, heavy)


@pytest.mark.parametrize("name", ["kvq", "kvq_calibrate"])
def test_an_interrupt_of_its_imports_ends_a_command_without_a_traceback(name, tmp_path):
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    body = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
sys.path.insert(0, {str(tmp_path)!r})
from kvq_runtime.cli import start
sys.exit(start.{name}())"""
    ended = subprocess.run([sys.executable, "-c", body, "--help"], capture_output=True, text=True)
    said = f"{name.replace('_', '-')}: interrupted while modules were loaded\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", said)


@pytest.mark.parametrize("name", ["kvq", "kvq_calibrate"])
def test_a_command_begins_with_its_program(name):
    command = [sys.executable, "-c", f"from kvq_runtime.cli import start; start.{name}()", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.startswith("kvq-runtime ")
