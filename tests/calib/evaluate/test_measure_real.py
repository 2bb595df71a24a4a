"""The runner for a real model, on a tiny one: nothing is measured twice, and what it finds is a page's record."""

import json
import os
from pathlib import Path

import pytest
import tiny
import torch

from kvq_calib.report import plots, tables
from kvq_calib.text.corpus import Batch
from kvq_runtime.artifact import artifact
from kvq_runtime.recipe import presets
from scripts import compare_page, measure_real, positions, real_page, real_use

RECIPES = ("rtn-4bit", "mean-higgs-2bit", "subkv-2bit")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, list[str]]:
    """Fitted and measured on a tiny model; what was measured, and the words of the command."""
    folder = tmp_path_factory.mktemp("real")
    model = tiny.with_text(folder)
    patch = pytest.MonkeyPatch()
    patch.setenv("KVQ_HOME", str(folder / "home"))
    patch.setenv("KVQ_TEST_DATA", str(folder))
    (folder / "other.txt").write_text((model / "corpus.txt").read_text()[::-1])
    (folder / "book.txt").write_text((model / "corpus.txt").read_text())
    texts = {"wikitext": "tiny-model/corpus.txt", "docs": "./other.txt", "book": "./book.txt", "code": "./absent.txt"}
    patch.setattr(measure_real, "TEXTS", texts)
    words = ["--model", str(model), "--name", "tiny", "--results", str(folder / "results"), "--lengths", "256"]
    words += ["--windows", "2", "--samples", "3", "--fit-length", "200", "--recipes", *RECIPES]
    assert measure_real.main(["fit", *words]) == 0 and measure_real.main(["scores", *words]) == 0
    yield folder / "results", words
    patch.undo()


@pytest.fixture(autouse=True)
def home(results, monkeypatch):
    """Where the module's runs are, not the test's own."""
    monkeypatch.setenv("KVQ_HOME", str(results[0].parent / "home"))
    monkeypatch.setenv("KVQ_TEST_DATA", str(results[0].parent))


def test_the_list_is_of_recipes_that_exist():
    known = [name for name in measure_real.RECIPES if measure_real.automatic(name) is None]
    assert set(known) <= set(presets()) and 25 <= len(set(measure_real.RECIPES)) == len(measure_real.RECIPES) <= 40
    assert [measure_real.automatic(name) for name in ("auto-1.1bit", "aqua-2bit")] == [1.1, None]
    assert {*measure_real.SOME, *real_use.IN_USE, *real_page.DRAWN} <= set(measure_real.RECIPES)


def test_every_recipe_is_measured_on_every_text_under_both_protocols(results):
    found = list(real_page.read(results[0]).values())
    seen = {(one["recipe"], one["on"], one["text"], one["protocol"]) for one in found}
    texts = ("wikitext", "docs", "book")
    expected = {("16 bit", None, text, "full") for text in texts}
    for protocol in ("full", "in-use"):
        expected |= {(name, None, text, protocol) for name in ("rtn-4bit", "subkv-2bit") for text in texts}
        expected |= {("mean-higgs-2bit", on, text, protocol) for on in ("wikitext", "docs") for text in texts}
    assert seen == expected and len(found) == len(seen)
    assert all(one["machine"]["processors"] and one["model"]["id"] == "tiny" for one in found)
    crossed = {one["artifact"] for one in found if one["recipe"] == "mean-higgs-2bit"}
    assert len(crossed) == 2, "an artifact a text that is fitted on"
    reasons = {
        one["part"].get("reason") for one in found if one["recipe"] == "subkv-2bit" and one["protocol"] == "full"
    }
    assert len(reasons) == 1 and "no full encode is its own" in reasons.pop()
    binned = {(one["text"], len(one["part"]["bins"])) for one in found if "bins" in one["part"]}
    assert binned == {("book", measure_real.BINS)}


def test_a_second_call_measures_what_is_missing_alone(results, monkeypatch, capsys):
    folder, words = results
    path = folder / "scores.jsonl"
    whole = path.read_bytes()
    calls, trace = [], positions.trace
    monkeypatch.setattr(positions, "trace", lambda *given: calls.append(1) or trace(*given))
    assert measure_real.main(["scores", *words]) == 0
    assert not calls and path.read_bytes() == whole and "all of it is measured" in capsys.readouterr().err
    lines = whole.decode().splitlines()
    gone = json.loads(lines[-1])
    assert "kl" in gone["part"]
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])  # a kill in the middle of a line
    assert measure_real.main(["left", *words]) == 0
    assert "256 tokens, in-use: 1 left" in capsys.readouterr().out
    assert measure_real.main(["scores", *words]) == 0
    again = json.loads(path.read_text().splitlines()[-1])
    assert len(calls) == 1 and len(path.read_text().splitlines()) == len(lines)
    assert again["key"] == gone["key"] and again["part"] == gone["part"]


def test_a_recipe_with_a_setting_is_kept_under_the_words_that_asked_for_it(results):
    words, name = results[1][: results[1].index("--recipes")], "mean-higgs-2bit+window.sinks=2"
    assert measure_real.main(["fit", *words, "--recipes", name, "--on", "wikitext"]) == 0
    (kept,) = Path(os.environ["KVQ_HOME"]).glob(f"real/*/wikitext-3x200/{name}.safetensors")
    assert artifact.load(kept).recipe.window.sinks == 2


def test_lines_make_a_page(results, tmp_path):
    folder, _ = results
    records = real_page.records(folder, "wikitext", 256)
    assert {one.result.recipe for one in records} == set(RECIPES)
    rows = tables.comparison(records)
    assert rows[0]["recipe"] == "16 bit" and float(rows[0]["full"]) == pytest.approx(float(rows[0]["in use"]), rel=1e-3)
    assert {"docs full KL", "docs in use KL"} <= set(rows[1]) and plots.frontier([records])
    model = compare_page.Model("tiny", "", None, samples=3, length=200, windows=2)
    lines = list(real_page.read(folder).values())
    beside = real_page.sections(folder, tmp_path)
    assert f"({real_page.POSITIONS})" in "".join(beside) and (tmp_path / real_page.POSITIONS).is_file()
    text = compare_page.page({model: records}, {model: []}, beside)
    head, *_ = text.partition("<details>")
    assert "tiny (" in head and "**By length.**" in head and "(real-positions.png)" in head
    assert sum(one["processor_seconds"] for one in lines) > 0 and "processor hours" in head


def test_the_same_tokens_in_windows_of_two_lengths_are_two_texts(tmp_path):
    tokens, figures = torch.arange(512, dtype=torch.int32), {"perplexity": 9.0, "relative": 0.01, "kl": 0.1}
    for length in (256, 128):
        batch = Batch(tokens.view(-1, length), "same", {"source": "demo", "corpus_digest": "c", "seq_len": length})
        real_page.keep_text(tmp_path, batch)
        line = {"key": str(length), "recipe": "rtn-4bit", "on": None, "text": "docs", "length": length, "step": None,
                "tokens": batch.digest, "protocol": "full", "bits": {"asymptotic": 4.25}, "part": figures, "sinks": 4,
                "recent": 0, "model": {"id": "tiny"}, "artifact": None, "window": {}, "environment": {}, "machine": {},
                }  # fmt: skip
        real_page.append(tmp_path, line)
    found = [real_page.records(tmp_path, "docs", length)[0].protocol for length in (256, 128)]
    assert [(one.windows, one.length) for one in found] == [(2, 256), (4, 128)]


def test_a_mixture_is_of_all_texts_that_are_at_hand_or_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVQ_TEST_DATA", str(tmp_path))
    assert measure_real.at_hand(["mix"]) == [] and "mix is left out: one of its parts" in capsys.readouterr().err
    monkeypatch.setattr(measure_real, "TEXTS", {"wikitext": "./a.txt", "docs": "demo", "code": "demo-code"})
    (path := tmp_path / "a.txt").touch()
    assert measure_real.at_hand(["mix"]) == ["mix"] and measure_real.source("mix") == f"{path} + demo + demo-code"


def test_the_table_of_the_readme_is_between_its_marks():
    text = f"before\n{real_page.OPEN}\nold\n{real_page.CLOSE}\nafter"
    assert real_page.readme(text, "| a |") == f"before\n{real_page.OPEN}\n| a |\n{real_page.CLOSE}\nafter"
    assert real_page.readme("no place", "| a |") == "no place"


def test_of_two_fits_the_table_has_the_newest_whichever_takes_fewer_bits(tmp_path):
    # bits, divergence; a fit on one of the texts alone is not in this table
    fits = ((1.0, 0.3, "mix"), (0.999, 0.2, "mix"), (1.001, 0.1, "mix"), (1.0, 0.4, "mix"), (1.0, 0.5, "wikitext"))
    for number, (bits, kl, on) in enumerate(fits):
        figures = {"perplexity": 9.0, "relative": 0.01, "kl": kl}
        line = {"key": str(number), "recipe": "aqua-fisher-1bit", "on": on, "text": "wikitext", "length": 1024,
                "protocol": "full", "bits": {"asymptotic": bits}, "part": figures}  # fmt: skip
        real_page.append(tmp_path, line)
    (tmp_path / "scores.jsonl").rename(tmp_path / real_page.MIXED)
    assert real_page.brief(tmp_path).splitlines()[2] == "| `aqua-fisher-1bit` | 1.00 | +1.00%, 0.4 |"


def test_the_picture_by_position_is_of_the_longest_windows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(real_page, "by_position", lambda *given: drawn.append(given) or b"")
    for key, length in enumerate((8192, 1024)):
        for recipe in ("16 bit", "rtn-4bit"):
            line = {"key": f"{key}{recipe}", "recipe": recipe, "on": None, "text": "book", "length": length,
                    "tokens": "the same", "protocol": "full", "part": {"bins": [length]}}  # fmt: skip
            real_page.append(tmp_path, line)
    assert real_page._positions(list(real_page.read(tmp_path).values()), tmp_path)
    ((exact, recipes, _),) = drawn
    assert exact["bins"] == [8192] and [one["length"] for one in recipes] == [8192]


def part(task: str, accuracy: float, length: int, chat: bool = False, recipe: str = "16 bit") -> dict:
    about = {"tasks": [task], "lengths": [length], "depths": [0.5], "samples": 1} | ({"chat": True} if chat else {})
    cells = [{"task": task, "length": length, "depth": 0.5, "accuracy": accuracy}]
    tasks = {task: {"accuracy": accuracy, "se": None, "texts": 1}}
    return {"protocol": about, "result": {"recipe": recipe, "protocols": {"in-use": {"tasks": tasks, "cells": cells}}}}


def test_tasks_are_those_that_the_16_bit_model_answers(tmp_path):
    with pytest.raises(ValueError, match="what the 16-bit model finds decides what is asked; use needles --first"):
        real_use.used(tmp_path, False)
    rows = [part("a", 0.4, 64), part("b", 0.6, 64), part("b", 0.0, 256), part("a", 0.9, 64, chat=True)]
    (tmp_path / "needles-16bit.json").write_text(json.dumps({str(n): {"found": [one]} for n, one in enumerate(rows)}))
    assert real_use.used(tmp_path, False) == ["b"] and real_use.used(tmp_path, True) == ["a"]


def test_records_of_one_length_each_make_one_picture():
    records = [part("a", 1.0, 64), part("a", 0.5, 64, recipe="r"), part("a", 0.8, 256), part("a", 0.2, 256, recipe="r")]
    records += [part("a", 0.0, 64, chat=True)]
    exact, other = real_page.joined(records)
    assert exact["protocol"]["lengths"] == [64, 256] and exact["result"]["recipe"] == "16 bit"
    found = {(c["length"], c["accuracy"]) for c in other["result"]["protocols"]["in-use"]["cells"]}
    assert found == {(64, 0.5), (256, 0.2)}
