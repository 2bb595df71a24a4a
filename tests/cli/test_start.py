"""Commands that need no tensor start without the libraries that take seconds to import."""

import json
import subprocess
import sys

import tiny_artifact as tiny

from kvq_runtime.registry.resolve import open_registry

HEAVY = ["torch", "numpy", "transformers", "safetensors", "huggingface_hub", "datasets", "matplotlib", "prefect"]
BODY = f"""
import contextlib, io, json, sys
from kvq_runtime.cli.main import main
found = []
for given in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(given.split())
    found.append([code, [name for name in {HEAVY!r} if name in sys.modules], out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
DONE = ["list", "history tiny-2bit", "promote tiny-2bit@1.0.0 --force", "promote tiny-2bit@1.0.1 --force",
        "rollback tiny-2bit", "yank tiny-2bit@1.0.1 --reason x",
        "--version", "--help", "recipes --help", "eval --help", "calibrate --help",
        "calibrate --list-models"]  # fmt: skip
WRONG = {
    "lst": "kvq: argument COMMAND: invalid choice: 'lst'",
    "promote": "kvq promote: the following arguments are required: REF; kvq promote --help",
    "eval higgs-4bit --model dmeo": "kvq: model 'dmeo': no such folder, .gguf file, Hub id (org/name) or",
    "calibrate --model dmeo": "kvq-calibrate: model 'dmeo': no such folder",
    "calibrate --max-perplexity-ratio 0.02": "kvq-calibrate: --max-perplexity-ratio 0.02; use",
}


def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    store = open_registry()
    for seed in (0, 1):
        store.publish("tiny-2bit", tiny.data(seed))
    command = [sys.executable, "-c", BODY, json.dumps([*DONE, *WRONG])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for given, (code, heavy, out, err) in zip([*DONE, *WRONG], found, strict=True):
        assert not heavy, f"{given} imports {heavy}"
        if given in DONE:
            assert code == 0 and out, (given, err)
        else:
            assert code in (2, 3) and not out and err.startswith(WRONG[given]) and err.count("\n") == 1, err
