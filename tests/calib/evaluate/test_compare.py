"""kvq compare: every family is there, what is fitted is fitted once, and the plot and table say what was measured."""

import argparse
import json
import math
import re
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
from kvq_runtime.recipe import facts, families, family, preset, presets
from kvq_runtime.registry import measured
from kvq_runtime.registry.measured import Figures, Scores
from kvq_runtime.registry.resolve import open_registry
from kvq_runtime.registry.sound import read
from scripts import compare_models, compare_page

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
    for protocol in measured.PROTOCOLS:
        kl = {one["result"]["recipe"]: one["result"]["protocols"][protocol]["kl"] for one in records}
        assert abs(kl["exact"]) < 1e-9 < kl["higgs-2bit"]
    bits = [one["result"]["bits"]["asymptotic"] for one in records]
    assert bits == sorted(bits) and bits[-1] == 16
    told = [read(one) for one in records]
    assert plot.read_bytes() == plots.comparison(told) != plots.comparison(told[:1])
    assert plots.comparison(told[-1:]), "a cost of nothing has no logarithm"
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
    for protocol in measured.PROTOCOLS:
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
        (["--recipes", "auto-vocab", "aqua-2bit", "auto", "--bits", "0.4"], ("aqua-2bit", "auto-vocab", "auto")),
        (["--recipes", "auto-vocab", "--bits", "0.4", "0.8"], ("auto-vocab",)),
        (["--recipes", "auto-vocab"], ("auto-vocab",)),  # which is then refused: it says no bits
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
    for name, recipes in families().items():
        assert name == "exact" or chosen & {recipe.name for recipe in recipes}, name
    for name, one in facts().items():
        assert set(one.compared or ()) <= {recipe.name for recipe in families()[name]}, name


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


@pytest.mark.parametrize("more, name, why", [
    ({"rope_refusal": "layer 2 (smollm3) has no RoPE"}, "aqua-2bit", "undoes RoPE, but of a model layer 2"),
    ({"joined": "latents"}, "squat-2bit", "is fitted to queries or outputs of heads"),
    ({"hidden_queries": "its attention adds"}, "squat-2bit", "outputs of heads, but of a model its attention adds"),
    ({"shares": True}, "h2o", "reads what a cache has decoded: it has layers that share"),
    ({"attending": [1, 3, 5]}, "aqua-metric-0.25bit-vocab", "stores the first layer by token"),
])  # fmt: skip
def test_what_a_models_layers_do_not_allow_is_left_out_too(more, name, why):
    model = shaped(6, 2, 64, **more)
    for asked in ([], ["all"]):
        found, notes = subject.choose(asked, model)
        assert found and name not in {recipe.name for recipe in found}
    assert any(note.startswith(f"{name} is left out: {name} ") and why in note for note in notes)
    with pytest.raises(ValueError, match=why):
        subject.choose([name], model)


def result(kl: float, bits: float) -> compare_page.Cost:
    return compare_page.Cost("a recipe", bits, Figures(perplexity=math.nan, relative=math.nan, kl=kl))


@pytest.mark.parametrize(
    "better, worse, says",
    [
        (result(0.1, 2), result(0.2, 2.2), "holds"),
        (result(0.1, 4), result(0.2, 2), "holds, with more bits"),
        (result(0.2, 2), result(0.1, 4), "undecided"),
        (result(0.2, 2), result(0.1, 2.2), "**does not hold**"),
        (result(0.2, 4), result(0.1, 2), "**does not hold**"),
        (result(0.102, 2), result(0.1, 2.2), "no difference"),
        (result(0.098, 2), result(0.1, 2.3), "holds"),
    ],
)
def test_a_claim_is_judged_with_its_bits(better, worse, says):
    assert compare_page.verdict(better, worse) == says
    for name, one in facts().items():
        for claim in one.claims:
            assert {claim.better, claim.worse} <= set(subject.compared()), f"{name}: name these in `compared`: {claim}"


def offered(recipe: str, bits: float, reported: float, chosen: float | None = None) -> compare_page.Cost:
    """Perplexities on the windows that are reported, and that are chosen by, against 10; a divergence of the former."""
    pair = [chosen or reported, reported] * 3
    windows = Scores(tuple(map(math.log, pair)), (math.log(10),) * 6, tuple(one - 9.9 for one in pair))
    return compare_page.Cost(recipe, bits, Figures(perplexity=math.nan, relative=math.nan, windows=windows))


def test_a_combination_is_held_against_the_best_near_recipe_of_each_paper():
    results = [
        offered("aqua-klt-1bit", 1.5, 10.3), offered("auto-2.1bit", 2.0, 10.2), offered("auto-3.1bit", 3.1, 10.0),
        offered("aqua-1bit", 1.6, 10.9), offered("aqua-2bit", 2.4, 10.1), offered("aqua-3bit", 3.3, 10.01),
        offered("squat-2bit", 3.0, 10.4), offered("squat-pre-2bit", 3.0, 10.3), offered("higgs-2bit", 2.0, 10.1),
    ]  # fmt: skip
    row = compare_page.rivals(results, 2.1)
    assert row == {
        "best combination": "auto-2.1bit, 2 bits: +2.00% ± 0.00%, 0.3",
        "AQUA-KV": "aqua-2bit, 2.4 bits: **+1.00% ± 0.00%**, **0.2**",
        "SQuat": "squat-pre-2bit, 3 bits: +3.00% ± 0.00%, 0.4",
    }
    assert compare_page.rivals(results, 1.4) == {} == compare_page.rivals(results, 2.6)
    assert set(compare_page.rivals(results, 3.2)) == {"best combination", "AQUA-KV"}
    # what looks best on some windows is reported on others; so are the papers' recipes, the best and not the cheapest
    results += [offered("aqua-klt-2bit", 2.1, 11.0, chosen=10.05), offered("aqua-2.2bit", 2.2, 10.05, chosen=10.9),
                offered("higgs-9bit", 2.3, 10.0)]  # fmt: skip
    row = compare_page.rivals(results, 2.1)
    assert row["best combination"] == "aqua-klt-2bit, 2.1 bits: +10.00% ± 0.00%, 1.1"
    assert row["AQUA-KV"] == "aqua-2bit, 2.4 bits: **+1.00% ± 0.00%**, **0.2**"
    assert family("auto-2.1bit") == "auto"
    changed = (
        recipe_text.read("aqua-klt-1bit+window.recent=32").name,
        recipe_text.read("squat-2bit+key.axis=token").name,
    )
    assert [family(name) for name in changed] == ["aqua-klt", "squat"] and family("mine") == "mine"
    others = ["svdq-wf-2bit", "aqua-metric-0.4bit-vocab", "mean-lloyd-2bit", "zipcache-3bit", "aqua-2bit-mlp"]
    assert [family(name) for name in others] == ["svdq", "aqua-metric", "turboquant", "zipcache", "aqua"]
    assert [family(name) for name in ("aqua-2bit", "h2o-higgs-2bit")] == ["aqua", "h2o"] and family(
        "mean-x"
    ) == "mean-x"
    assert all(family(one.name) == file.replace("_", "-") for file, own in families().items() for one in own)


def of_two_texts(recipe: str, bits: float, reported: float, chosen: float, other: float) -> dict:
    kls = [chosen, reported] * 3
    part = {"windows": {"loss": kls, "reference_loss": [0.0] * 6, "kl": kls}, "relative": 0.5, "perplexity": 13.5,
            "kl": math.nan, "reference_perplexity": 9.0, "top1": 0.5}  # fmt: skip
    web = {"protocols": {"full": {**part, "kl": other}}}
    result = {"recipe": recipe, "protocols": {"full": part}, "texts": {"web": web}, "layers": []}
    result["bits"] = {"asymptotic": bits, "at_length": bits, "at_4096": bits}
    text = {"source": "stories", "split": "held-out"}
    protocol = {"model": {"id": "m", "parameters": 4_000_000}, "windows": 6, "length": 64, "text": text}
    protocol["texts"] = {"web": {"windows": 3, "length": 64, "text": text}}
    return {"artifact": recipe, "corpus": "1", "protocol": protocol, "environment": {}, "result": result}


def test_the_page_opens_with_the_best_at_some_budgets_chosen_by_other_windows():
    records = [
        of_two_texts("aqua-klt-1bit", 1.5, reported=0.3, chosen=0.2, other=0.00004),
        of_two_texts("aqua-2bit", 2.1, 0.01, 0.4, 0.2),
        of_two_texts("higgs-2bit", 2.1, 0.5, 0.6, 0.7), of_two_texts("mean-higgs-2bit", 2.12, 0.02, 0.1, 0.9),
    ]  # fmt: skip
    records = [read(one) for one in records]
    low, high = compare_page.best_at(records, (1.5, 2))
    assert low["best here"] == "`aqua-klt-1bit` (1.50)" and low["best of a paper's"] == "none"
    assert low["best here: in domain"] == "+34.99% ± 0.00%, 0.3" and low["best here: web"] == "+50.00%, 0.00004"
    assert high["best here"] == "`mean-higgs-2bit` (2.12)", "best where it was chosen, not where it is reported"
    assert high["best of a paper's"] == "`aqua-2bit` (2.10)" and high["best of a paper's: in domain"].endswith(", 0.01")
    model = compare_page.Model("m", "m", None, samples=4, length=64, windows=6)
    text = compare_page.page({model: records}, {model: ["higgs-9bit is left out: why"]})
    opening, *folded = text.split("<details>")
    assert (
        opening.count("![") == 1
        and "m (4M parameters)](frontier.png)" in opening
        and opening.count("\n| ") == 2 + len(compare_page.best_at(records))
    )
    every, of_model, *_ = folded
    assert "(compare.png)" in every, "all models and texts are folded away"
    assert "higgs-9bit is left out: why" in of_model and "| recipe |" in of_model and "web full KL" in of_model
    assert text.count("<details>") == text.count("</details>") >= 3


def records_for_pictures() -> list[dict]:
    records = [of_two_texts("aqua-klt-1bit", 1.5, 0.3, 0.2, 0.1), of_two_texts("higgs-2bit", 2.1, 0.01, 0.4, 0.2)]
    for one in records:  # what a picture of all recipes needs beside
        for part in (one["result"]["protocols"], one["result"]["texts"]["web"]["protocols"]):
            part["full"]["kl"] = one["result"]["bits"]["asymptotic"] / 10
    return records


@pytest.mark.slow
def test_one_model_is_measured_and_the_page_keeps_the_others(tmp_path, monkeypatch):
    docs, kept = tmp_path / "docs", tmp_path / "kept"
    docs.mkdir()
    kept.mkdir()
    (kept / "narrow.json").write_text(json.dumps(records_for_pictures()))
    monkeypatch.setattr(compare_models, "DOCS", docs)
    monkeypatch.setattr(compare_models, "RECORDS", kept)
    monkeypatch.setattr(compare_models, "measure", lambda *_: records_for_pictures())
    monkeypatch.setattr(compare_models, "left_out", lambda *_: [])
    monkeypatch.setattr("sys.argv", ["compare_models", "--model", "demo", "--real", str(tmp_path / "none")])
    monkeypatch.delenv("KVQ_TEST_DATA", raising=False)
    assert compare_models.main() == 0
    assert json.loads((kept / "demo.json").read_text()) == records_for_pictures()
    text = (docs / "compare.md").read_text()
    assert "<summary>demo" in text and "<summary>narrow" in text


@pytest.mark.slow
def test_page_and_pictures_are_made_from_records_without_measuring(tmp_path, monkeypatch):
    records = records_for_pictures()
    for name in ("demo", "stories260K"):
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    monkeypatch.setattr(compare_models, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(compare_models, "left_out", lambda *_: [])
    words = ["--records", str(tmp_path), "--docs", str(tmp_path), "--real", str(tmp_path / "none")]
    monkeypatch.setattr("sys.argv", ["compare_models", *words])
    monkeypatch.delenv("KVQ_TEST_DATA", raising=False)
    assert compare_models.main() == 0
    made = {path.name for path in tmp_path.iterdir()} - {"demo.json", "stories260K.json"}
    assert made == {"compare.md", "compare.png", "compare-demo.png", "compare-stories260K.png", "frontier.png"}
    linked = set(re.findall(r"[(]([^)]*png)[)]", (tmp_path / "compare.md").read_text()))
    assert linked == made - {"compare.md"}
