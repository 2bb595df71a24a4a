"""A wrong command line is answered in a line, before anything heavy is imported; a shell completes the right one."""

import json
import subprocess
import sys

import pytest

WRONG = {
    ("promote",): "kvq promote: the following arguments are required: REFERENCE; kvq promote --help",
    ("list", "--regsitry", "x"): "kvq list: unrecognized arguments: --regsitry; did you mean --registry; kvq list",
    ("eval", "higgs-4bit", "--model", "dmeo"): "kvq: model 'dmeo' is no folder, no Hub id (org/name) and not in",
    ("compare", "--model", "demo", "--plot", "out.xyz"): "kvq compare: argument --plot: 'out.xyz'; pictures are",
    ("calibrate", "--model", "dmeo"): "kvq-calibrate: model 'dmeo' is no folder",
    ("calibrate", "--model", "demo", "--seq-len", "1"): "kvq-calibrate: argument --seq-len: '1'; use a whole number of",
    ("calibrate", "--max-perplexity-ratio", "0.02"): "kvq-calibrate: --max-perplexity-ratio 0.02: perplexity over",
}
BODY = """
import contextlib, io, json, sys
from kvq_runtime.cli.main import main
found = []
for given in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(given)
    found.append([code, err.getvalue(), [name for name in ("torch", "transformers") if name in sys.modules]])
print(json.dumps(found))
"""
COMPLETE = """
source {script}
complete_it() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
    "_shtab_${{1//-/_}}"; echo "${{COMPREPLY[@]}}"
}}
complete_it kvq promo
complete_it kvq compare --prot
complete_it kvq calibrate --max-k
complete_it kvq-calibrate --corpus README
"""


def test_what_is_wrong_is_said_in_a_line_without_torch():
    command = [sys.executable, "-c", BODY, json.dumps([list(given) for given in WRONG])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for (given, begins), (code, err, heavy) in zip(WRONG.items(), found, strict=True):
        assert code in (2, 3) and err.startswith(begins) and err.count("\n") == 1 and not heavy, (given, err, heavy)


def test_a_shell_completes_commands_options_and_files(kvq, tmp_path):
    pytest.importorskip("shtab")
    assert kvq("completion", "bash", "--json")[0] == 2, "there is no JSON of a script"
    code, out, _ = kvq("completion", "bash")
    assert code == 0
    (tmp_path / "kvq.bash").write_text(out)
    (tmp_path / "README.md").touch()
    script = COMPLETE.format(script=tmp_path / "kvq.bash")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["promote", "--protocol", "--max-kl", "README.md"], done.stdout + done.stderr


def test_completion_names_the_extra_that_it_needs(kvq, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = kvq("completion", "zsh")
    assert code == 1 and not out and "kvq completion needs shtab; the extra `completion`" in err
