"""kvq compare: every family is there, fitted recipes are fitted once, and a resumed command measures nothing again."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from kvq_calib.evaluate import candidate, perplexity
from kvq_calib.report import plots
from kvq_calib.run import calibrate as graph
from kvq_runtime.cli.main import main
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import families, preset, presets
from kvq_runtime.registry.evaluation_records import PROTOCOLS, parse
from kvq_runtime.registry.resolve import open_registry

NAMES = ("higgs-2bit", "mean-higgs-2bit", "aqua-2bit", "exact")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.with_text(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, *more: str) -> int:
    words = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--length", "200", "--samples", "4"]
    words += ["--windows", "2", "--recent", "0", "--device", "cpu", "--run", str(folder), "--protocol", "both"]
    return main(["compare", *words, *more])


@pytest.mark.slow
def test_one_fit_and_one_reference_serve_all_recipes(model, tmp_path, capsys, monkeypatch):
    layers, scored = [], []
    fit, states = graph.fit_layer, perplexity.hidden_states

    def fitted(work, stream, layer):
        layers.append((layer, [recipe.name for recipe in work.plan.recipes]))
        fit(work, stream, layer)

    monkeypatch.setattr(graph, "fit_layer", fitted)
    monkeypatch.setattr(perplexity, "hidden_states", lambda *given: scored.append(given[2]) or states(*given))
    plot = tmp_path / "plot.png"
    assert run(model, tmp_path / "run", "--json", "--plot", str(plot), "--recipes", *NAMES) == 0
    records = json.loads(capsys.readouterr().out)
    assert layers == [(layer, ["mean-higgs-2bit", "aqua-2bit"]) for layer in range(2)]
    assert scored.count(None) == 2, "one reference a protocol"
    assert {one["result"]["recipe"] for one in records} == set(NAMES)
    for protocol in PROTOCOLS:
        kl = {one["result"]["recipe"]: one["result"]["protocols"][protocol]["kl"] for one in records}
        assert abs(kl["exact"]) < 1e-9 < kl["higgs-2bit"]
    bits = [one["result"]["bits"]["asymptotic"] for one in records]
    assert bits == sorted(bits) and bits[-1] == 16
    assert plot.read_bytes() == plots.png(plots.cost_by_bits([parse(one) for one in records]))
    assert not open_registry().names(), "nothing is published"
    # stopped and resumed, or with a recipe more: only what is new is measured
    count = len(scored)
    assert run(model, tmp_path / "run", "--json", "--recipes", *NAMES, "rtn-4bit") == 0
    said = capsys.readouterr()
    assert len(layers) == 2 and len(scored) == count + 4 and scored.count(None) == 4, "a pass, and a reference's"
    assert [one for one in json.loads(said.out) if one["result"]["recipe"] != "rtn-4bit"] == records
    assert "windows of 200 tokens: the last stay exact in a full encode; use a multiple of 128" in said.err


@pytest.mark.slow
def test_recipes_from_settings_and_files_and_budgets(model, tmp_path, capsys):
    """A setting counts in what is measured, and an equal recipe costs the same; sinks are the same for all."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(preset("rtn-4bit").to_json() | {"name": "mine"}))
    recipes = ["rtn-2bit", "rtn-2bit+key.quantize.bits=4+value.quantize.bits=4", str(file)]
    assert run(model, tmp_path / "run", "--json", "--bits", "2.1", "--sinks", "3", "--recipes", *recipes) == 0
    records = json.loads(capsys.readouterr().out)
    two, changed, mine, auto = sorted(records, key=lambda one: ("auto" in one["result"]["recipe"],
                                                                "mine" in one["result"]["recipe"],
                                                                len(one["result"]["recipe"])))  # fmt: skip
    for protocol in PROTOCOLS:
        kl = [one["result"]["protocols"][protocol]["kl"] for one in (two, changed, mine)]
        assert kl[1] == kl[2] < kl[0] / 4
    assert auto["result"]["recipe"] == "auto-2.1bit" and 2 < auto["result"]["bits"]["asymptotic"] <= 2.1
    assert all(one["protocol"]["sinks"] == 3 and one["protocol"]["recent"] == 0 for one in records)


def shaped(*shape: int) -> Any:
    """What is asked of a model by which recipes suit it."""
    plain = {"id": "a model", "rope_refusal": None, "attending": range(shape[0]), "architecture": "LlamaForCausalLM"}
    return SimpleNamespace(geometry=Geometry(*shape), **plain)


def test_every_family_is_represented_by_default():
    chosen = {recipe.name for recipe in candidate.choose([], shaped(6, 2, 64))[0]}
    for name, family in families().items():
        assert name == "exact" or chosen & set(family.presets), name
        assert set(family.compared) <= set(family.presets), name


def test_unsuited_recipes_are_left_out_with_a_reason_or_refused_by_name():
    small = shaped(5, 4, 8)
    chosen, notes = candidate.choose(["all"], small)
    assert chosen and len(chosen) + len(notes) == len(presets())
    with pytest.raises(ValueError, match="no recipe 'aqua-9bit'"):
        candidate.choose(["aqua-9bit"], small)
    for note in notes:
        with pytest.raises(ValueError):
            candidate.choose([note.split()[0]], small)
