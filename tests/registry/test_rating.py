"""What a version costs is judged without being asked, and a bad one is not promoted unless that is insisted on."""

import math

import pytest
import tiny_artifact as tiny

from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry import rating, resolve
from kvq_runtime.registry.evaluation_records import parse

NAME = "tiny-2bit"


def record(relative, kl=0.01, sha256="ab" * 32, seed=0, source="book.txt", windows=4, **result):
    figures = {"perplexity": 12 * (1 + relative), "reference_perplexity": 12.0, "relative": relative, "kl": kl}
    about = {"windows": windows, "length": 512, "text": {"source": source, "seed": seed}}
    found = {"recipe": "tiny", "protocols": {"full": figures}} | result
    return {"artifact": sha256, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": found}


@pytest.mark.parametrize(
    "given, word",
    [
        (record(0.02), rating.USABLE), (record(0.10, 0.1), rating.USABLE), (record(0.101), rating.LOSSY),
        (record(0.0, 0.101), rating.LOSSY), (record(math.nan), rating.LOSSY), (None, rating.NOT_MEASURED),
        (record(0, protocols={"full": {"reason": "nothing was encoded"}}), rating.NOT_MEASURED),
        (record(0.5, gate={"bounds": {"perplexity_ratio": 2.0}, "failed": []}), rating.USABLE),
        (record(0.02, gate={"bounds": {"kl": 0.001}, "failed": ["KL divergence: 0.01"]}), rating.LOSSY),
    ],
)  # fmt: skip
def test_a_record_is_judged_by_its_bounds_else_by_a_tenth_and_a_tenth_of_a_nat(given, word):
    assert rating.rate(given and parse(given)).word == word


def test_what_counts_is_the_longest_record_of_the_fits_own_text_and_no_weekly_one():
    good, other = parse(record(0.01)), parse(record(2.0, source="code", windows=400))
    weekly = parse(record(3.0, windows=900, seed=202614))
    assert rating.rate_records([weekly, other, good], "book.txt").word == rating.USABLE
    assert rating.rate_records([weekly, other, good, parse(record(1.0, windows=8))], "book.txt").word == rating.LOSSY
    judged = record(0.5, windows=99, gate={"bounds": {"kl": 1.0}, "failed": [7]})
    with pytest.raises(ArtifactError, match="gate.failed.0: 7 is not str"):
        parse(judged)


def test_a_version_that_nobody_measured_is_promoted_only_by_force_and_history_says_who(kvq, as_json, monkeypatch):
    store = resolve.open_registry()
    store.publish(NAME, tiny.data())
    code, out, err = kvq("promote", f"{NAME}@1.0.0")
    assert code == 4 and not out and "is not measured: " in err and "--force" in err
    assert store.state(NAME).at("production") is None
    monkeypatch.setenv("KVQ_USER", "ann")
    code, out, err = kvq("promote", f"{NAME}@1.0.0", "--force")
    assert code == 0 and "not measured" in err
    store.add_evaluation(record(0.01, 0.01, store.state(NAME).versions["1.0.0"].sha256), NAME)
    assert kvq("promote", f"{NAME}@1.0.0", "--alias", "beta")[0] == 0
    published, *promoted = as_json("history", NAME)
    assert "@" in published["by"] and [(row["by"], row["force"]) for row in promoted] == [("ann", True), ("ann", False)]
    monkeypatch.setenv("KVQ_USER", "a\nb")
    assert kvq("yank", f"{NAME}@1.0.0", "--reason", "x")[0] == 2


def test_a_lossy_version_is_promoted_only_by_force(kvq, as_json):
    store = resolve.open_registry()
    version = store.publish(NAME, tiny.data())
    store.add_evaluation(record(1.93, 1.08, version.sha256), NAME)
    with pytest.raises(Conflict, match=r"tiny-2bit@1.0.0 is too lossy: perplexity \+193.0%, KL 1.1 nats, full encode"):
        store.promote(NAME, "1.0.0")
    code, out, err = kvq("promote", f"{NAME}@1.0.0")
    assert code == 4 and not out and "--force" in err and store.state(NAME).at("production") is None
    code, out, err = kvq("promote", f"{NAME}@1.0.0", "--force")
    assert code == 0 and "too lossy" in err and store.state(NAME).at("production") == "1.0.0"


@pytest.mark.parametrize(
    "samples, held, said",
    [(16, 0, "none was held out"), (8, 1, "fitted on 7 sequences (8 less 1 held out), fewer than 8"), (9, 1, None)],
)  # fmt: skip
def test_a_thin_fit_is_said(samples, held, said):
    found = rating.fit_warning({"samples": samples, "held_out": held})
    assert found is None if said is None else said in found
    assert rating.fit_warning({"samples": "many"}) is None
