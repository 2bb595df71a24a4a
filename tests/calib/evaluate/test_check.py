"""kvq check: its figures are those of an evaluation, and its advice follows from them."""

import json

import pytest
import tiny

from kvq_calib.evaluate import check
from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.record import Protocol, evaluate
from kvq_calib.model import find as models
from kvq_calib.text import corpus


def test_rows_are_evaluations_and_bytes_at_the_context(as_json, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "LENGTH", 128)
    folder = tiny.save(tmp_path / "model", "qwen2", layers=2)
    text = tiny.text(folder)
    checked = as_json("check", folder, "--corpus", text, "--device", "cpu", "--quiet")
    exact, *rows = checked["rows"]
    assert (checked["compressed"], checked["tokens"], exact["MiB"] * 2**20) == (1, 512, 4 * 2 * 32 * 512)
    by_name = {row["recipe"]: row for row in rows}
    assert tuple(by_name) == check.CHECKED and "keys alone" not in by_name["rtn-8bit"]
    files = models.resolve(folder)
    batch = corpus.select(str(text), files.path, check.WINDOWS, 128, split="held-out")
    names = ["kivi-2bit", "kivi-2bit+value.quantize=exact", "kivi-2bit+key.axis=token+key.quantize=exact"]
    records = evaluate(files, batch, [find(name, files) for name in names], Protocol(protocols=("full",)))
    measured = [one["result"]["protocols"]["full"]["kl"] for one in records]
    assert [by_name["kivi-2bit"][column] for column in ("KL", *check.ALONE)] == pytest.approx(measured, rel=1e-6)


def test_layers_that_slide_are_not_compressed(tmp_path):
    folder = tiny.save(tmp_path / "model", "qwen2", layers=4)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config["layer_types"] = ["full_attention", *["sliding_attention"] * 3]
    (folder / "config.json").write_text(json.dumps(config))
    summary = check.summarize(models.resolve(folder), [], [])
    assert summary["compressed"] == 512 / (512 + 3 * 64)


def test_advice_is_the_smallest_safe_recipe(tmp_path):
    files = models.resolve(tiny.save(tmp_path / "model", "qwen2", layers=2))
    rows = [{"recipe": "16 bit", "MiB": 1.0}, {"recipe": "a", "MiB": 0.5, "KL": 1e-4, "top1": 1.0},
            {"recipe": "b", "MiB": 0.25, "KL": check.SAFE, "top1": 0.9},
            {"recipe": "c", "MiB": 0.2, "KL": 0.5, "top1": 0.5, "keys alone": 0.4, "values alone": 0.1}]  # fmt: skip
    safe, parts, _, following = check.advice(files, "./model", rows)
    assert "b. It takes 25% of the bytes" in safe and "0.4 with keys alone" in parts and "--model ./model" in following
    assert "none of these" in next(check.advice(files, "./model", [rows[0], rows[3]]))


@pytest.mark.slow
def test_four_bits_are_safe_on_qwen_and_two_are_not(as_json, qwen):
    checked = as_json("check", qwen, "--device", "cpu", "--quiet")
    losses = {row["recipe"]: row.get("KL", 0) for row in checked["rows"]}
    assert losses["rtn-8bit"] < 0.001 < losses["kivi-4bit"] <= check.SAFE < losses["kivi-2bit"]
    assert checked["rows"][0]["MiB"] == 384 and "kivi-2bit" not in checked["advice"][0]
