"""A real lm-eval, as `kvq eval --tasks` runs it, on task files with data of their own.

`make test-lm-eval`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is in an environment of its own: make test-lm-eval")

import lm_eval
from lm_eval.tasks import TaskManager

from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.record import load_model
from kvq_calib.lm_eval import HFLM, Asked, CompressedLM, NotThroughTheCache, evaluate
from kvq_calib.model.find import resolve

ROOT = Path(__file__).parents[2]
DEMO = resolve("demo")
NAMES = ("exact+window.recent=0", "rtn-2bit+window.recent=0")
TEXT = (ROOT / "LICENSE").read_text()  # which does not change
CHOICE = {
    "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
ANSWER = {
    "output_type": "generate_until", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
WHOLE = {
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}  # fmt: skip
ALL = ("own_choice", "own_answer", "own_text")


def write(folder: Path, name: str, settings: dict, rows: list[dict]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    task = {"task": name, "doc_to_text": "{{text}}", "metadata": {"version": 1.0}} | files | settings
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML too


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts of 270 tokens and more, of different lengths, and one task whose texts are too short to be encoded."""
    made = tmp_path_factory.mktemp("tasks")
    os.environ["HF_DATASETS_CACHE"] = str(made / "cache")
    texts = [TEXT[start : start + 1000 + 70 * number] for number, start in enumerate((500, 4000, 8000))]
    choices = [{"text": text, "choices": [" the cache", " a token of the", " of"], "right": 1} for text in texts]
    write(made, "own_choice", CHOICE, choices)
    write(made, "own_answer", ANSWER, [{"text": text, "answer": "the"} for text in texts])
    write(made, "own_text", WHOLE, [{"text": text} for text in texts])
    write(made, "own_short", CHOICE, [{**choices[0], "text": "Short."}])
    write(made, "own_absent", CHOICE | {"dataset_path": "someone/absent"}, [])
    return made


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def lm(model, recipe: str | None) -> CompressedLM:
    return CompressedLM(DEMO, model, find(recipe, DEMO) if recipe else None, quiet=True)


def results(folder: Path, lm, *names: str) -> dict:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=list(names), task_manager=manager)["results"]


def figures(rows: dict) -> dict:
    return {task: {name: value for name, value in row.items() if "," in name} for task, row in rows.items()}


def answers(folder: Path, lm, task: str) -> list[str]:
    """What was answered, by example: texts, or log-likelihoods and whether they are the likeliest."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    samples = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager)["samples"][task]
    return [str(sample["resps"]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def test_exact_is_the_16_bit_model_and_two_bits_are_not(folder, model):
    first, exact, two = (figures(results(folder, lm(model, name), *ALL)) for name in (None, *NAMES))
    assert exact == first
    plain, same, other = (answers(folder, lm(model, name), "own_answer") for name in (None, *NAMES))
    assert same == plain != other, "another text"
    assert two["own_text"]["bits_per_byte,none"] > first["own_text"]["bits_per_byte,none"] + 0.01
    stock = HFLM(model, tokenizer=str(DEMO.path), batch_size=2)
    theirs = figures(results(folder, stock, *ALL))
    for task in ALL:
        assert theirs[task] == pytest.approx(first[task], rel=1e-5), "what lm-eval's own model gives"


def test_a_run_that_read_nothing_encoded_is_refused(folder, model):
    with pytest.raises(NotThroughTheCache, match=r"own_short: nothing was encoded .* its 3 requests .* block of 128"):
        results(folder, lm(model, NAMES[1]), "own_short")
    assert results(folder, lm(model, None), "own_short")["own_short"]["acc,none"] in (0, 1)
    given = Asked(("own_short", "own_choice"))
    _, record = evaluate(DEMO, [find(NAMES[1], DEMO)], given, include_path=str(folder), quiet=True)
    part = record["result"]["protocols"]["in-use"]
    assert "nothing was encoded" in part["tasks"]["own_short"]["reason"]
    assert part["through_the_cache"]["own_choice"]["read_encoded"] == 9 and part["tasks"]["own_choice"]["metrics"]


def test_what_was_answered_is_not_answered_again(folder, model, monkeypatch):
    first = results(folder, lm(model, NAMES[1]), *ALL)
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("answered again"))
    assert figures(results(folder, lm(model, NAMES[1]), *ALL)) == figures(first)


def test_the_command_writes_the_figures(folder, tmp_path):
    """In a process of its own; then a task whose data are not here."""
    out = tmp_path / "out.json"
    words = ["-m", "kvq_runtime.cli.main", "eval", NAMES[1], "--model", "demo", "--quiet"]
    words += ["--include-path", str(folder)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def run(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words, *more], env=env, capture_output=True, text=True, cwd=ROOT)

    done = run("--tasks", ",".join(ALL), "--limit", "2", "--json", "--output", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    first, record = json.loads(done.stdout)
    assert json.loads(out.read_text()) == [first, record]
    part = record["result"]["protocols"]["in-use"]
    assert part["through_the_cache"]["own_choice"]["read_encoded"] == 6
    metrics = {task: answered["metrics"] for task, answered in part["tasks"].items()}
    assert metrics["own_text"] != first["result"]["protocols"]["in-use"]["tasks"]["own_text"]["metrics"]
    absent = run("--tasks", "own_absent")
    assert absent.returncode != 0 and "task own_absent: " in absent.stderr
