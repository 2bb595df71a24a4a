"""What needs no tensor starts without the libraries that take seconds to import."""

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
