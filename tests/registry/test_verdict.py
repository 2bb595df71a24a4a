"""What a version costs is judged without being asked, and a bad one is not promoted unless that is insisted on; and
what windows that were measured say of windows that were not.
"""

import math
import random

import pytest
import tiny_artifact as tiny

from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry import resolve, verdict
from kvq_runtime.registry.measured import Figures, Scores
from kvq_runtime.registry.sound import read

NAME = "tiny-2bit"


def record(relative, kl=0.01, sha256="ab" * 32, seed=0, source="book.txt", windows=4, digest=None, **result):
    figures = {"perplexity": 12 * (1 + relative), "reference_perplexity": 12.0, "relative": relative, "kl": kl}
    about = {"windows": windows, "length": 512, "text": {"source": source, "seed": seed, "corpus_digest": digest}}
    found = {"recipe": "tiny", "protocols": {"full": figures}} | result
    return {"artifact": sha256, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": found}


@pytest.mark.parametrize(
    "given, word",
    [
        (record(0.02), verdict.USABLE), (record(0.10, 0.1), verdict.USABLE), (record(0.101), verdict.LOSSY),
        (record(0.0, 0.101), verdict.LOSSY), (record(math.nan), verdict.LOSSY), (None, verdict.NOT_MEASURED),
        (record(0, protocols={"full": {"reason": "nothing was encoded"}}), verdict.NOT_MEASURED),
        (record(0.5, gate={"bounds": {"perplexity_ratio": 2.0}, "failed": []}), verdict.USABLE),
        (record(0.02, gate={"bounds": {"kl": 0.001}, "failed": ["KL divergence: 0.01"]}), verdict.LOSSY),
    ],
)  # fmt: skip
def test_a_record_is_judged_by_its_bounds_else_by_a_tenth_and_a_tenth_of_a_nat(given, word):
    assert verdict.of_record(given and read(given)).word == word


def test_what_counts_is_the_longest_record_of_the_fits_own_text_and_no_weekly_one():
    good, other = read(record(0.01)), read(record(2.0, source="code", windows=400))
    weekly = read(record(3.0, windows=900, seed=202614))
    assert verdict.of_records([weekly, other, good], "book.txt").word == verdict.USABLE
    assert verdict.of_records([weekly, other, good, read(record(1.0, windows=8))], "book.txt").word == verdict.LOSSY
    judged = record(0.5, windows=99, gate={"bounds": {"kl": 1.0}, "failed": [7]})
    with pytest.raises(ArtifactError, match="gate.failed.0: 7 is not text"):
        read(judged)


def test_the_fits_own_text_is_known_by_its_digest():
    """A summary has 200 characters of a name, which may be a list of corpora; two may begin alike."""
    long = "x" * 200
    own, other = (read(record(relative, source=long + name, windows=count, digest=name * 64))
                  for relative, name, count in ((0.01, "a", 4), (2.0, "b", 400)))  # fmt: skip
    assert verdict.of_records([other, own], long, "a" * 64).word == verdict.USABLE
    assert verdict.of_records([other, own], long, "b" * 64).word == verdict.LOSSY
    unknown = read(record(2.0, source=long + "b", windows=400))
    assert verdict.of_records([unknown, own], long, "a" * 64).word == verdict.LOSSY, "by name where one has no digest"


def test_a_lossy_version_is_promoted_only_by_force(kvq, as_json):
    store = resolve.open_registry()
    version = store.publish(NAME, tiny.data())
    assert "not measured" in kvq("promote", f"{NAME}@1.0.0", "--alias", "trial")[2]
    store.add_evaluation(record(1.93, 1.08, version.sha256), NAME)
    with pytest.raises(Conflict, match=r"tiny-2bit@1.0.0 is too lossy: perplexity \+193.0%, KL 1.1 nats, full encode"):
        store.promote(NAME, "1.0.0")
    code, out, err = kvq("promote", f"{NAME}@1.0.0")
    assert code == 4 and not out and "--force" in err and store.state(NAME).at("production") is None
    code, out, err = kvq("promote", f"{NAME}@1.0.0", "--force")
    assert code == 0 and "too lossy" in err and store.state(NAME).at("production") == "1.0.0"


@pytest.mark.parametrize(
    "samples, held, said",
    [(1, 0, "fitted on 1 sequence, fewer than 8; none was held out"), (16, 0, "none was held out"),
     (8, 1, "fitted on 7 sequences (8 less 1 held out), fewer than 8"), (9, 1, None)],
)  # fmt: skip
def test_a_thin_fit_is_said(samples, held, said):
    found = verdict.thinness({"samples": samples, "held_out": held})
    assert found is None if said is None else said in found
    assert verdict.thinness({"samples": "many"}) is None


def figures(kls: list[float]) -> Figures:
    return Figures(perplexity=2.0, relative=0.0, windows=Scores(kl=tuple(kls)))


def test_a_bound_is_a_window_that_was_seen():
    assert figures([float(n) for n in range(19, 0, -1)]).kl_bound(0.95) == (19.0, 0.95)
    assert figures([float(n) for n in range(1, 40)]).kl_bound(0.95) == (38.0, 0.95)
    assert figures([3.0, 1.0]).kl_bound(0.95) == (3.0, pytest.approx(2 / 3))
    assert figures([3.0, 1.0, 2.0]).kl_bound(0.5) == (2.0, 0.5)
    assert figures([]).kl_bound(0.95) is None and Figures(perplexity=2.0, relative=0.0).kl_bound(0.9) is None


@pytest.mark.parametrize("count, level", [(12, 0.9), (19, 0.95), (5, 0.95)])
def test_it_holds_as_often_as_it_says_of_any_distribution(count, level):
    """Heavy tails as well: of 4,000 draws, to four standard errors."""
    draw, kept, trials = random.Random(0), 0, 4000
    for _ in range(trials):
        x, share = figures([draw.paretovariate(0.7) for _ in range(count)]).kl_bound(level)
        kept += draw.paretovariate(0.7) <= x
    assert kept / trials >= share - 4 * (share * (1 - share) / trials) ** 0.5
