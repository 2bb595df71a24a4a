"""kvq compare: every family is there, what is fitted is fitted once, and the plot and table say what was measured."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from kvq_calib.cli import commands
from kvq_calib.evaluate import perplexity, record, subject
from kvq_calib.job import prepare
from kvq_calib.report import plots, tables
from kvq_calib.run import calibrate as graph
from kvq_runtime.artifact import recipe_text
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import families, preset, presets
from kvq_runtime.registry import evaluation_records
from kvq_runtime.registry.evaluation_records import parse
from kvq_runtime.registry.resolve import open_registry

NAMES = ("higgs-2bit", "mean-higgs-2bit", "aqua-2bit", "exact")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.with_text(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, *more: str) -> int:
    top = argparse.ArgumentParser()
    commands.add_compare(top.add_subparsers())
    words = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--length", "200", "--samples", "4"]
    words += ["--windows", "2", "--recent", "0", "--device", "cpu", "--run", str(folder), "--also", "none"]
    args = top.parse_args(["compare", *words, *more])
    return args.run(args)


@pytest.mark.slow
def test_one_fit_and_one_reference_serve_all_recipes(model, tmp_path, capsys, monkeypatch):
    layers, references = [], []
    fit, logits = graph.fit_layer, perplexity.Windows.expected.func

    def fitted(work, stream, layer):
        layers.append((layer, [recipe.name for recipe in work.plan.recipes]))
        fit(work, stream, layer)

    class Counted(perplexity.Windows):
        @property
        def expected(self):
            if "found" not in self.__dict__:
                references.append(self)
                self.found = logits(self)
            return self.found

    monkeypatch.setattr(graph, "fit_layer", fitted)
    monkeypatch.setattr(perplexity, "Windows", Counted)
    prepared, once = [], prepare.prepare
    monkeypatch.setattr(prepare, "prepare", lambda job: prepared.append(job) or once(job))
    plot = tmp_path / "plot.png"
    assert run(model, tmp_path / "run", "--json", "--layers", "--plot", str(plot), "--recipes", *NAMES) == 0
    assert len(prepared) == 1
    records = json.loads(capsys.readouterr().out)
    assert layers == [(layer, ["mean-higgs-2bit", "aqua-2bit"]) for layer in range(2)]
    assert len(references) == 2, "one a protocol"
    assert {one["result"]["recipe"] for one in records} == set(NAMES)
    for protocol in evaluation_records.PROTOCOLS:
        kl = {one["result"]["recipe"]: one["result"]["protocols"][protocol]["kl"] for one in records}
        assert abs(kl["exact"]) < 1e-9 < kl["higgs-2bit"]
    bits = [one["result"]["bits"]["asymptotic"] for one in records]
    assert bits == sorted(bits) and bits[-1] == 16
    told = [parse(one) for one in records]
    assert plot.read_bytes() == plots.perplexity_by_bits(told) != plots.perplexity_by_bits(told[:1])
    assert plots.perplexity_by_bits(told[-1:]), "a cost of nothing has no logarithm"
    rows = tables.comparison(told)
    assert rows[0]["recipe"] == "16 bit" and len(rows) == 5
    for protocol in ("full", "in use"):
        assert rows[-1][f"{protocol} attention"] < 1e-9 < rows[1][f"{protocol} attention"]
    assert not open_registry().names(), "nothing is published"

    # stopped and resumed, or with a recipe more: only what is new is measured
    assert run(model, tmp_path / "run", "--json", "--layers", "--recipes", *NAMES, "rtn-4bit") == 0
    again = json.loads(capsys.readouterr().out)
    assert len(layers) == 2 and len(references) == 4
    assert [one for one in again if one["result"]["recipe"] != "rtn-4bit"] == records
    assert run(model, tmp_path / "run", "--layers", "--recipes", *NAMES, "rtn-4bit") == 0
    said = capsys.readouterr()
    assert len(references) == 4 and "rtn-4bit" in said.out
    assert "the last of them stay exact in a full encode, 72 in blocks of 128" in said.err


def test_errors_by_layer_are_measured_where_they_are_asked_for(model, tmp_path, capsys, monkeypatch):
    streams = []
    monkeypatch.setattr(record.errors, "by_layer", lambda *given: streams.append(given) or {})
    assert (
        run(model, tmp_path / "run", "--protocol", "full", "--plot", str(tmp_path / "p.png"), "--recipes", *NAMES[:1])
        == 0
    )
    said = capsys.readouterr().out
    assert not streams and "full KL" in said and "attention" not in said
    assert run(model, tmp_path / "run", "--protocol", "full", "--layers", "--recipes", *NAMES[:1]) == 0
    assert len(streams) == 1


def test_recipes_from_settings_and_files_are_compared_under_their_own_names(model, tmp_path, capsys):
    """What is fitted, and what is not: a setting counts in what is measured, and an equal recipe costs the same."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(preset("rtn-4bit").to_json() | {"name": "mine"}))
    recipes = ["rtn-2bit", "rtn-2bit+key.quantize.bits=4+value.quantize.bits=4", str(file), "mean-higgs-2bit"]
    words = ["--json", "--recipes", *recipes, "mean-higgs-2bit", "--set", "window.sinks=2"]
    assert run(model, tmp_path / "run", *words) == 0
    found = {one["result"]["recipe"]: one["result"] for one in json.loads(capsys.readouterr().out)}
    changed = recipe_text.read(recipes[1], ["window.sinks=2"]).name
    assert set(found) == {"rtn-2bit-window.sinks-2", changed, "mine-window.sinks-2", "mean-higgs-2bit-window.sinks-2"}
    for protocol in evaluation_records.PROTOCOLS:
        kl = {name: result["protocols"][protocol]["kl"] for name, result in found.items()}
        assert kl[changed] == kl["mine-window.sinks-2"] < kl["rtn-2bit-window.sinks-2"] / 4


@pytest.mark.slow
def test_budgets_and_equal_exact_tokens(model, tmp_path, capsys):
    words = ["--bits", "2.1", "--sinks", "3", "--recipes", "kivi-2bit", "aqua-2bit", "--json"]
    assert run(model, tmp_path / "run", *words) == 0
    found = {one["result"]["recipe"]: one for one in json.loads(capsys.readouterr().out)}
    assert set(found) == {"auto-2.1bit", "kivi-2bit", "aqua-2bit"}
    assert 2 < found["auto-2.1bit"]["result"]["bits"]["asymptotic"] <= 2.1
    assert all(one["protocol"]["sinks"] == 3 and one["protocol"]["recent"] == 0 for one in found.values())
    assert found["auto-2.1bit"]["artifact"] != found["aqua-2bit"]["artifact"]


@pytest.mark.parametrize(
    "words, fitted",
    [
        (["--recipes", "kivi-2bit", "aqua-2bit", "--bits", "0.4"], ("aqua-2bit", "auto")),
        (["--recipes", "auto", "--bits", "0.4", "0.8"], ("auto",)),
        (["--recipes", "auto"], ("auto",)),  # which is then refused: it says no bits
    ],
)
def test_what_chooses_bits_is_named_like_a_recipe(model, tmp_path, monkeypatch, words, fitted):
    jobs = []

    def stopped(job):
        jobs.append(job)
        raise RuntimeError("far enough")

    monkeypatch.setattr(prepare, "prepare", stopped)
    with pytest.raises(RuntimeError, match="far enough"):
        run(model, tmp_path, *words)
    assert jobs[0].what.recipes == fitted


def shaped(*shape: int, **more: Any) -> Any:
    """What is asked of a model by which recipes suit it."""
    plain = {"id": "a model", "rope_refusal": None, "joined": None, "shares": False, "hidden_queries": None}
    plain |= {"attending": range(shape[0]), "architecture": "LlamaForCausalLM"}
    return SimpleNamespace(geometry=Geometry(*shape), **plain | more)


def test_every_family_is_represented_by_default():
    chosen = {recipe.name for recipe in subject.choose([], shaped(6, 2, 64))[0]}
    for name, family in families().items():
        assert name == "exact" or chosen & set(family.presets), name
        assert set(family.compared) <= set(family.presets), name


def test_what_does_not_suit_a_model_is_left_out_with_a_reason_or_refused_by_name():
    small = shaped(5, 4, 8)
    found, notes = subject.choose(["all"], small)
    assert found and all(recipe.check(small.geometry) is recipe for recipe in found)
    assert len(found) + len(notes) == len(presets())
    assert any(note.startswith("aqua-2bit-quanto is left out: ") for note in notes)
    with pytest.raises(ValueError, match="no recipe 'aqua-9bit'"):
        subject.choose(["aqua-9bit"], small)
    for note in notes:
        with pytest.raises(ValueError):
            subject.choose([note.split()[0]], small)
