"""The stage between fit and publication: what it measures, what it keeps, and what a bound stops."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import many_versions as many
import pytest
import tiny
from patience import held, until

from kvq_calib.cli import calibrate as cli
from kvq_calib.evaluate import perplexity, quality_checks, record
from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.saved_results import SavedResults
from kvq_calib.fit import scheme
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.job.run import run
from kvq_runtime.artifact import artifact
from kvq_runtime.registry import rating
from kvq_runtime.registry import resolve as registry
from kvq_runtime.registry.evaluation_records import parse
from kvq_runtime.registry.rating import Bounds


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.with_text(tmp_path_factory.mktemp("model"))


def arguments(model: Path, run: Path, *more: str) -> list[str]:
    corpus = str(model / "corpus.txt")
    given = ["--model", str(model), "--corpus", corpus, "--samples", "4", "--seq-len", "384"]
    return [*given, "--held-out", "1", "--run", str(run), "--json", *more]


def asked(model: Path, run: Path, **settings) -> Job:
    given = {"corpus": str(model / "corpus.txt"), "samples": 4, "held_out": 1, "seq_len": 384, "run": str(run)}
    return Job(model=str(model), **given | settings)


def test_what_is_published_was_measured_as_kvq_eval_measures(model, tmp_path, monkeypatch):
    monkeypatch.setattr(perplexity, "ROW_TOKENS", 384)  # a window at a time, of five
    done, spent = run(asked(model, tmp_path / "run", recipes=("mean-higgs-2bit",), baselines=("higgs-2bit",)))
    resolved = registry.resolve("tiny-model-mean-higgs-2bit")
    (kept,) = registry.open_registry().evaluations(resolved.sha256)
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert written[0] == kept and [one["artifact"] for one in written] == [resolved.sha256, "higgs-2bit"]
    work = prepare(asked(model, tmp_path / "other"))
    files, batch = work.files, quality_checks.choose(work)
    again = record.evaluate(files, batch, [find("tiny-model-mean-higgs-2bit", files)], record.Protocol(precise=True))
    (tmp_path / "out").mkdir()
    shutil.copyfile(resolved.path, tmp_path / "out" / "kvq.safetensors")  # as kvq pull writes it
    assert find(str(tmp_path / "out"), files).sha256 == resolved.sha256
    assert again[0]["protocol"] == kept["protocol"] and again[0]["environment"] == kept["environment"]
    first, second = (parse(one).figures("full") for one in (kept, again[0]))
    assert first.beyond == second.beyond and 0 <= first.beyond <= 1
    assert second.kl == pytest.approx(first.kl, rel=1e-6)
    assert kept["protocol"]["text"]["split"] == "held-out" and kept["protocol"]["windows"] == 4
    told = done[0].record()
    assert told["kl_nats_per_token"] == first.kl > 0 and told["protocol"] == "full encode" and spent["evaluation"] > 0
    files = registry.open_registry().existing(resolved.name).get(resolved.version).files
    assert set(files) == {"README.md", "perplexity-by-bits.png"}
    card = registry.open_registry().blob(files["README.md"]["sha256"]).read_text()
    assert f"{first.kl:.4g}" in card and f"| {first.beyond:.2%} |" in card and "| higgs-2bit |" in card
    assert "![perplexity by bits](perplexity-by-bits.png)" in card


def test_without_evaluation_nothing_is_measured(model, tmp_path, capsys):
    assert cli.main(arguments(model, tmp_path / "run", "--no-eval")) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "KL" not in row and registry.open_registry().evaluations(row["sha256"]) == []
    assert not (tmp_path / "run" / "evaluated").exists()


@pytest.mark.slow
def test_a_bound_stops_publication_and_says_why(model, tmp_path, capsys):
    run = tmp_path / "run"
    words = arguments(model, run, "--recipe", "mean-higgs-2bit+all.quantize.size=256", "--recipe", "mean-higgs-2bit")
    assert cli.main([*words, "--no-publish"]) == 0
    capsys.readouterr()
    four, two = (parse(made).figures("full").kl for made in json.loads((run / "evaluation.json").read_text()))
    assert four < two
    assert cli.main([*words, "--max-kl", f"{(four + two) / 2:.6g}", "--max-perplexity-ratio", "100"]) == 5
    captured = capsys.readouterr()
    good, bad = (row["artifact"] for row in json.loads(captured.out))
    assert good.endswith("@1.0.0") and bad == "tiny-model-mean-higgs-2bit"
    assert "tiny-model-mean-higgs-2bit was not published. KL divergence, nats, full encode" in captured.err
    assert registry.open_registry().names() == [good.partition("@")[0]]
    left = run / "artifacts" / "tiny-model-mean-higgs-2bit"
    assert artifact.load(left / "kvq.safetensors").recipe.name == "mean-higgs-2bit"
    gate = json.loads((left / "evaluation.json").read_text())["result"]["gate"]
    assert gate["bounds"]["perplexity_ratio"] == 100 and len(gate["failed"]) == 1
    assert "Bounds for publication" in (left / "README.md").read_text() and (left / "perplexity-by-bits.png").is_file()


@pytest.mark.parametrize(
    "bounds, failed",
    [(Bounds(), 0), (Bounds(perplexity_ratio=1.02, kl=0.02), 0), (Bounds(perplexity_ratio=1.005, kl=0.005), 2),
     (Bounds(kl=0.02, beyond=0.01), 1)],
)  # fmt: skip
def test_gate(bounds, failed):
    costs = {"perplexity": 12.0, "relative": 0.01, "kl": 0.01}
    unknown = many.of_parts(full=costs | {"relative": math.nan, "kl": math.nan})
    given = many.of_parts(full=costs | {"beyond": 0.02})
    assert len(rating.failed_bounds(parse(given), bounds)) == failed
    assert len(rating.failed_bounds(parse(unknown), bounds)) == len(bounds.given)
    assert ("gate" in rating.with_gate(given, bounds)["result"]) == bool(bounds.given)


@pytest.mark.slow
def test_more_blocks_beyond_calibrations_errors_than_allowed_stop_publication(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scheme, "quantile_of", lambda errors_N: 0.0)  # so that all are
    assert (
        cli.main(
            arguments(model, tmp_path / "run", "--recipe", "mean-higgs-2bit", "--samples", "8", "--max-beyond", "0.5")
        )
        == 5
    )
    told = capsys.readouterr()
    assert "full encode: 1, allowed 0.5" in told.err and '"blocks_beyond": 1.0' in told.out
    assert registry.open_registry().names() == []


@pytest.mark.parametrize(
    "more, says",
    [
        (["--no-eval", "--max-kl", "0.1"], "--no-eval"),
        (["--max-perplexity-ratio", "0.02"], "1.02 allows +2%"),
        (["--max-kl", "1", "--seq-len", "64", "--recipe", "subkv-aqua-2bit"], "encode no block of 32"),
        (["--eval-windows", "5000"], "held-out part"),
        (["--recipe", "mean-higgs-2bit", "--baseline", "mean-higgs-2bit"], "mean-higgs-2bit"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_work(model, tmp_path, capsys, more, says):
    assert cli.main(arguments(model, tmp_path / "run", *more)) in (2, 3)
    captured = capsys.readouterr()
    assert says in captured.err and not captured.out
    assert not (tmp_path / "run" / "layer-0000").exists()


@pytest.mark.slow
def test_a_finished_unit_is_not_done_again(model, tmp_path, monkeypatch):
    """Stopped in its second windows, an evaluation resumes there; the artifact and its record are as if undisturbed."""
    monkeypatch.setattr(perplexity, "ROW_TOKENS", 2 * 384)
    settings = {"recipes": ("mean-higgs-2bit", "mean-higgs-2bit+all.quantize.size=256"), "publish": False}
    run(asked(model, tmp_path / "undisturbed", **settings))
    scored, compare, stopped = [], perplexity.compare, []

    def watched(head, tokens_BT, hidden):
        if not hidden:
            return {}
        if len(scored) == 1 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        scored.append(list(hidden))
        return compare(head, tokens_BT, hidden)

    monkeypatch.setattr(perplexity, "compare", watched)
    with pytest.raises(KeyboardInterrupt):
        run(asked(model, tmp_path / "run", **settings))
    for _ in range(2):
        run(asked(model, tmp_path / "run", **settings))
        assert [len(names) for names in scored] == [3, 3], "two groups of windows, the 16-bit model's with them"
    first, second = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("undisturbed", "run"))
    assert first == second


@pytest.mark.slow
def test_progress_reaches_its_end_exactly_with_and_without_kept_units(model, tmp_path):
    for _ in range(2):
        heard = []
        run(asked(model, tmp_path / "run", recipes=("mean-higgs-2bit",), publish=False), heard.append)
        said = [one for one in heard if one.layer < 0]
        assert said[-1].done == said[-1].total > 0


FOUR = (
    "mean-higgs-2bit",
    "mean-higgs-2bit+all.quantize.size=64",
    "mean-higgs-2bit+all.quantize.size=256",
    "mean-higgs-head-2bit-post",
)


@pytest.mark.slow
def test_killed_during_the_evaluation_it_resumes(model, tmp_path):
    run = tmp_path / "run"
    words = arguments(model, run, *(f"--recipe={name}" for name in FOUR), "--eval-windows", "3")
    program = f"import sys; from kvq_calib.cli.calibrate import main; sys.exit(main({words!r}))"
    hold = tmp_path / "hold"
    hold.touch()
    third = "'/evaluated/' in name and sum(one.endswith('.json') for one in beside) >= 3"
    command = [sys.executable, "-c", held(hold, third) + program]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(kept(run)) >= 3 or child.poll() is not None, pause=0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (run / "evaluation.json").exists()
    before = {path: path.stat().st_mtime_ns for path in kept(run)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4 and before.items() <= {p: p.stat().st_mtime_ns for p in kept(run)}.items()


def kept(run: Path) -> list[Path]:
    """The finished units of an evaluation, the choice of its text among them."""
    folder = run / "evaluated"
    return [folder / name for name in os.listdir(folder) if name.endswith(".json")] if folder.is_dir() else []


# ---- the saved ------------------------------------------------------------------------------------------------------


def test_a_ledger_tells_units_apart(tmp_path):
    own = SavedResults(tmp_path).within(model="a")
    own.write({"x": 0.1}, unit=1)
    assert own.read(unit=1) == {"x": 0.1}
    assert own.read(unit=2) is None and own.within(model="b").read(unit=1) is None
    assert SavedResults().read(unit=1) is None
    next(tmp_path.glob("*.json")).write_text("{")
    with pytest.raises(RuntimeError, match="damaged; delete it"):
        own.read(unit=1)
