"""The README as a newcomer reads it: its blocks run as they stand, and its figures are what they print."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import fitted
import pytest

from kvq_runtime.artifact.artifact import Artifact, to_bytes
from kvq_runtime.hf.model import fingerprint_of, geometry_of
from kvq_runtime.recipe import preset
from kvq_runtime.registry.resolve import open_registry

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs" / "models.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_block_runs_without_an_artifact_and_its_figures_are_the_readmes(monkeypatch, capsys):
    """Then the way that it names to load an artifact, with one of random tensors in the registry."""
    monkeypatch.chdir(ROOT)
    first, _ = blocks("python")
    names: dict = {}
    exec(compile(first, "README.md", "exec"), names)
    report = names["cache"].memory_report()
    text, again, *said = capsys.readouterr().out.splitlines()
    assert text == again and str(report) == "\n".join(said)
    assert report.total_bytes < report.exact_bytes
    said = re.search(r"that ([\d,]+) tokens take (\S+) MiB, where 16\s+bit would take (\S+) MiB", TEXT)
    assert said is not None
    held, exact = report.total_bytes / 2**20, report.exact_bytes / 2**20
    assert said.groups() == (f"{report.tokens:,}", f"{held:.1f}", f"{exact:.1f}")

    model, recipe = names["model"], preset("aqua-2bit")
    tensors = fitted.tensors(recipe, geometry_of(model))
    made = Artifact(recipe, fingerprint_of(model), tensors, {"model": "demo"}, {"layers": [{}] * 6})
    open_registry().publish("demo-aqua-2bit", to_bytes(made))
    (serve,) = re.findall(r"`(KVQCache\.from_pretrained\([^`]+\))`", TEXT)
    names["cache"] = eval(serve.replace("NAME", "demo-aqua-2bit"), names)
    names["out"] = model.generate(**names["inputs"], past_key_values=names["cache"], max_new_tokens=8)
    assert model.config._attn_implementation == "kvq" and names["out"].shape == (1, 968)
    assert names["cache"].memory_report().recipe == "aqua-2bit"


def test_the_length_from_which_it_is_smaller_is_what_the_command_says(as_json):
    ((command, said),) = re.findall(r"`(\.venv/bin/kvq bytes [^`]+)` ([^.]+)\.", TEXT)
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/kvq"
    found = as_json(*[ROOT / one if one.startswith("artifacts/") else one for one in arguments])
    (row,) = [row for row in found if row["recipe"] == "kivi-4bit"]
    assert re.findall(r"under 16 bit from (\d+) tokens on", said) == [str(row["under 16 bit from"])]


def test_the_versions_are_those_of_the_project():
    needs = " ".join([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]])
    needs += " " + " ".join(PROJECT["optional-dependencies"]["triton"])
    row = {
        cells[1].strip(): cells[2] for cells in (line.split("|") for line in INSTALL.splitlines()) if len(cells) == 5
    }
    assert f"{PROJECT['requires-python'].removeprefix('>=')} or newer" in row["Python"]
    low, high = re.search(r"transformers>=([\d.]+),<5\.(\d+)", needs).groups()
    assert f"{low} to 5.{int(high) - 1}" in row["transformers"]
    low, high = re.search(r"torch>=([\d.]+),<(\d+)", needs).groups()
    assert f"{low} to {int(high) - 1}.x" in row["torch"]
    assert f"{re.search(r'triton>=([0-9.]+)', needs)[1]} or newer" in row["triton"]
    pins = dict(re.findall(r"^(torch|transformers)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    tested = {
        cells[1].strip(): cells[3] for cells in (line.split("|") for line in INSTALL.splitlines()) if len(cells) == 5
    }
    assert pins["torch"] in tested["torch"] and pins["transformers"] in tested["transformers"]


def test_every_extra_has_a_row_or_is_for_contributors():
    table = INSTALL.partition("## Architectures")[0]
    rows = set(re.findall(r"`([a-z0-9-]+)`", "".join(re.findall(r"^\|((?: `[a-z0-9-]+`,?)+) \|", table, re.MULTILINE))))
    contributors = set(
        re.findall(r"Extras for this work: `(\w+)`.*?`(\w+)`", (ROOT / "CONTRIBUTING.md").read_text())[0]
    )
    assert rows | contributors == set(PROJECT["optional-dependencies"]) and not rows & contributors


def test_the_second_block_loads_a_calibrated_cache(qwen, monkeypatch):
    monkeypatch.chdir(ROOT)
    imports = [line for line in blocks("python")[0].splitlines() if line.startswith("from ")]
    names: dict = {}
    exec(compile("\n".join([*imports, blocks("python")[1]]), "README.md", "exec"), names)
    names["model"].generate(**names["model"].dummy_inputs, past_key_values=names["cache"], max_new_tokens=2)
    assert names["cache"].memory_report().recipe == "fisher-3bit"


@pytest.mark.slow
def test_the_first_block_needs_no_network_and_no_registry(tmp_path):
    """In a process of its own, without a home: nothing is downloaded, nothing is read from a registry."""
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    short = blocks("python")[0].replace("960", "600")
    done = subprocess.run([sys.executable, "-c", short], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "kivi-4bit: 639 tokens" in done.stdout, done.stderr
    assert not (tmp_path / ".kvq").exists()
