"""Texts of other kinds beside the corpus: the same windows whatever is fitted on, and figures of their own."""

import json
from pathlib import Path

import pytest
import tiny

from kvq_calib.evaluate import record
from kvq_calib.evaluate.record import Protocol
from kvq_calib.evaluate.subject import find
from kvq_calib.job.job import Evaluation, Job, Text, What
from kvq_calib.job.run import run
from kvq_calib.model import find as models
from kvq_calib.report import tables
from kvq_calib.text import corpus
from kvq_calib.text.documents import EMBEDDED
from kvq_runtime.registry.evaluation_records import parse


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    folder.mkdir()
    tiny.save(folder, "llama", layers=2)
    text = tiny.text(folder).read_text(encoding="utf-8")
    (folder / "other.txt").write_text(text[9000::-1], encoding="utf-8")
    return folder


def test_names_and_sources():
    assert corpus.others(["a=b.txt", "demo-code", "c=x=y.jsonl"]) == {
        "a": "b.txt",
        "demo-code": "demo-code",
        "c": "x=y.jsonl",
    }
    with pytest.raises(ValueError, match="has no name; give NAME=SOURCE, or one of demo, demo-code"):
        corpus.others(["book.txt"])
    assert corpus.others(["none"]) == corpus.others([]) == {}
    with pytest.raises(ValueError, match="texts demo-code none; give none alone, or leave it out"):
        corpus.others(["demo-code", "none"])
    with pytest.raises(ValueError, match="text a is given twice"):
        corpus.others(["a=b.txt", "a=c.txt"])


def test_windows_do_not_depend_on_what_is_fitted_on(model: Path):
    one, two = str(model / "corpus.txt"), str(model / "other.txt")
    own = corpus.select(one, model, 3, 200, split="held-out")
    beside = corpus.select_others([f"x={one}"], two, model, 3, 200)["x"]
    assert beside.digest == own.digest
    assert beside.description["overlap"]["against"] == ["corpus.txt", "other.txt"]
    few = corpus.select_others([f"x={two}"], one, model, 50, 200)["x"]
    assert 2 <= len(few.tokens_BT) < 50
    with pytest.raises(ValueError, match="text x: the held-out part of other.txt gives 0 sequences"):
        corpus.select_others([f"x={two}"], one, model, 2, 5000)


def test_of_a_mixture_as_much_is_measured_on_as_the_least_of_it_gives(model: Path, tmp_path: Path):
    """That of the first has too little is found first, and then that of the second has less."""
    for name in "ab":
        (tmp_path / name).mkdir()
    pair = [tiny.text(tmp_path / "a", 30000, 1), tiny.text(tmp_path / "b", 20000, 2)]
    most, least = (len(corpus.select_fewer(str(one), model, 50, 200, 0, 1).tokens_BT) for one in pair)
    source = " + ".join(map(str, pair))
    mixed = corpus.select_others([f"x={source}"], str(model / "corpus.txt"), model, 50, 200)["x"]
    assert most > least and len(mixed.tokens_BT) == 2 * least


def test_figures_of_a_text_beside_are_those_it_has_alone(model: Path):
    files = models.resolve(model)
    subjects = [find(name, files) for name in ("higgs-2bit", "rtn-4bit", "subkv-2bit")]
    one, two = (corpus.select(str(model / f"{n}.txt"), model, 3, 200, split="held-out") for n in ("corpus", "other"))
    settings, heard = Protocol(error_windows=1), []
    together = record.evaluate(files, one, subjects, settings, progress=heard.append, others={"else": two})
    assert sum(heard) == record.work(files, one, 3, settings, {"else": two})
    apart = [record.evaluate(files, text, subjects, settings) for text in (one, two)]
    for both, first, second, protocol in zip(together, *apart, ("full", "full", "in-use"), strict=True):
        assert both["result"]["protocols"] == first["result"]["protocols"]
        alone = second["result"]["protocols"][protocol]  # in use for what has no full encode
        assert both["result"]["texts"]["else"]["protocols"] == {protocol: alone} and "perplexity" in alone
        assert both["result"]["protocols"] != second["result"]["protocols"]
        view, other = parse(both).elsewhere()["else"], parse(second)
        assert (view.protocol, view.corpus) == (other.protocol, other.corpus)
    together = [parse(one) for one in together]
    rows = tables.table(together)
    assert [row["text"] for row in rows] == ["corpus.txt"] * 4 + ["else"] * 4
    assert rows[5]["full"] == tables.relative(parse(apart[1][0]).figures("full"))
    assert rows[5]["in use"] == "none" != rows[7]["in use"]
    said = tables.notes(together)
    assert said[0].startswith(
        "3 windows of 200 tokens of corpus.txt, held-out part; 0.0% of their runs of 64 bytes are"
    )
    assert said[1].startswith("else: 3 windows of 200 tokens of other.txt")


def test_a_model_has_its_other_texts():
    """The embedded model code beside documentation, and the reverse; what is fitted on is never the other text."""
    demo, listed, folder = (models.entry(name) for name in ("demo", "qwen2.5-0.5b", "some-folder"))
    assert demo.beside() == demo.beside("demo") == demo.beside("c4.jsonl") == folder.beside() == ("demo-code",)
    assert demo.beside("demo-code") == folder.beside("demo-code") == ("demo",)
    assert listed.beside() == ("wikitext-2", "demo-code")
    for entry in models.CATALOG.values():
        corpus.others(entry.beside())
        assert set(entry.beside("mine.txt")) <= set(EMBEDDED), "nothing that is downloaded beside a file"


def test_a_job_measures_on_its_model_s_other_text_unless_it_says_otherwise():
    files, given = models.resolve("demo"), {"samples": 4, "seq_len": 256}
    assert Job(What("demo")).beside(files) == ("demo-code",)
    assert Job(What("demo"), Text("demo-code")).beside(files) == ("demo",)
    assert Job(What("demo"), evaluation=Evaluation(also=("none",))).beside(files) == ("none",)
    asked = Job.from_settings(model="demo", also=["none"], **given)
    assert corpus.select_others(asked.beside(files), "demo", files.path, 2, 256) == {}


@pytest.mark.slow
def test_a_calibration_measures_on_other_texts_and_its_card_says_so(model: Path, tmp_path: Path):
    given = {"corpus": str(model / "corpus.txt"), "samples": 4, "seq_len": 384, "run": str(tmp_path / "run")}
    given |= {"recipes": ["mean-higgs-2bit"], "also": [f"back={model / 'other.txt'}"], "publish": False}
    run(Job.from_settings(model=str(model), **given))
    (kept,) = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    alone = kept["result"]["texts"]["back"]["protocols"]["full"]
    assert alone["tokens"] == 2 * 383
    (card,) = (tmp_path / "run").glob("*/README.md")
    text = card.read_text()
    assert f"{alone['kl']:.4g}" in text and "2 windows of 384 tokens of other.txt, held-out part" in text
    assert "measured on corpus.txt, back." in text
