"""The progress of a calibration while it works, and its outcome."""

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvq_calib.cli import outcome, progress
from kvq_calib.cli.progress import Bar
from kvq_calib.job.run import Published, PublishedAt
from kvq_calib.run import bit_allocation
from kvq_calib.run.run import Progress
from kvq_runtime.registry.evaluation_records import TextRecord, parse
from kvq_runtime.registry.reference import registry_url


def record(name: str, relative: float) -> TextRecord:
    figures = {"perplexity": 12 * (1 + relative), "reference_perplexity": 12.0, "relative": relative, "kl": 0.02}
    about = {"windows": 4, "length": 64, "text": {"source": "demo"}}
    result = {"recipe": name, "bits": {"asymptotic": 2.125}, "protocols": {"full": figures}}
    return parse({"artifact": name, "corpus": "c", "protocol": about, "result": result})


GOOD, BASELINE = record("ab" * 32, -2e-6), record("higgs-2bit", 0.0312)
HERE = PublishedAt(registry_url(), "m-aqua-2bit@1.2.0", "/blobs/ab", False)
THERE = PublishedAt("file:///other", "m-aqua-2bit@1.0.0", "/other/blobs/ab", True)
MADE = Published("aqua-2bit", "m-aqua-2bit", "ab" * 32, 2.4583, 0.026, 0.0072, GOOD, places=(HERE, THERE), folder="/f")


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(outcome, "registry_url", lambda: HERE.registry)


def test_the_end_says_where_an_artifact_is_and_what_to_do_next(capsys):
    outcome.show([MADE], [GOOD, BASELINE])
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert lines["16"].split()[:3] == ["16", "bit", "16"] and "12.000" in lines["16"]
    assert "+3.12%" in lines["higgs-2bit"] and "-0.00%" not in shown
    assert f"m-aqua-2bit@1.2.0 in {HERE.registry} (these bytes were there already)\n" in shown
    assert "m-aqua-2bit@1.0.0 in file:///other\n" in shown and "VERDICT        USABLE" in shown
    assert 'KVQCache.from_pretrained("m-aqua-2bit@1.2.0", model=model)\n' in shown
    assert "kvq promote m-aqua-2bit@1.2.0   (" in shown


@pytest.mark.parametrize("made, records, says, promotes", [
    (replace(MADE, places=(replace(HERE, yanked="wrong tokenizer"),)), [GOOD], ["WITHDRAWN      wrong token"], False),
    (replace(MADE, places=(THERE,)), [GOOD], [', registry="file:///other")', "@1.0.0 --registry file:///other"], True),
    (replace(MADE, places=()), [GOOD], ['from_pretrained("/f/kvq.safetensors", model=model)'], False),
    (replace(MADE, places=(), failed=["KL"]), [GOOD], ["not published  it exceeds the bounds"], False),
    (MADE, [record("ab" * 32, 1.93)], ["TOO LOSSY: perplexity +193.0%"], False),
    (MADE, [], ["NOT MEASURED", "kvq eval m-aqua-2bit@1.2.0 --model M"], False),
], ids=["withdrawn", "elsewhere", "run folder", "failed", "lossy", "not measured"])  # fmt: skip
def test_only_a_version_that_can_be_used_is_to_be_promoted(made, records, says, promotes, capsys):
    outcome.show([made], records, caution="fitted on 1 sequence")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ["CAUTION        fitted on 1 sequence", *says]), shown
    assert ("kvq promote m-aqua" in shown) == promotes


def test_json_is_numbers_with_their_units_in_the_names(capsys):
    outcome.show([MADE], [GOOD, BASELINE], "few", json=True)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["perplexity_over_16_bit"] == 1 - 2e-6 and found["kl_nats_per_token"] == 0.02
    assert found["bits_per_element"] == 2.4583 and found["exceeds"] == [] and found["caution"] == "few"
    assert [place["path"] for place in found["published"]] == ["/blobs/ab", "/other/blobs/ab"]
    assert found["baselines"][0]["perplexity_over_16_bit"] == pytest.approx(1.0312)
    assert found["verdict"]["word"] == "usable"


def test_progress_is_lines_without_a_terminal_and_counts_layers(monkeypatch):
    """Of two rounds of two layers: the second layer of the first begins at a quarter of all."""
    monkeypatch.setattr(sys, "stderr", error := io.StringIO())
    monkeypatch.setattr(progress, "INTERVAL", 0)
    monkeypatch.setattr(bit_allocation, "count_rounds", lambda plan: 2)
    bar = Bar(SimpleNamespace(recipes=["aqua-2bit"], geometry=SimpleNamespace(layers=2)))  # type: ignore[arg-type]
    for stage, done in (("capture", 1), ("aqua-2bit keys", 1), ("aqua-2bit values", 1), ("aqua-2bit values", 2)):
        bar(Progress(1, 2, stage, done, 2))
    bar(Progress(-1, 2, "evaluation", 5, 10))
    bar.close()
    lines = [line.partition(" done")[0] for line in error.getvalue().splitlines()]
    assert lines[0] == "kvq-calibrate: layers: 25%"
    assert "kvq-calibrate: layer 2 of 2, aqua-2bit values 2/2: 25%" in lines
    assert lines[-1] == "kvq-calibrate: evaluation: 50%"
