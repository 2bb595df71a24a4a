"""What the methods promise, on real models: perplexity on held-out text in a full encode: every token but the sinks."""

from typing import Any

import pytest

from kvq_calib.evaluate import record
from kvq_calib.evaluate.candidate import find
from kvq_calib.job.job import Job
from kvq_calib.job.run import run
from kvq_calib.model import find as models
from kvq_calib.text import corpus
from kvq_runtime.registry.evaluation_records import parse


def scores(files, batch, names) -> dict[str, Any]:
    candidates = [find(name, files) for name in names]
    protocol = record.Protocol(protocols=("full",))
    found = record.evaluate(files, batch, candidates, protocol)
    return {candidate.name: parse(one).figures("full") for candidate, one in zip(candidates, found, strict=True)}


@pytest.mark.slow
@pytest.mark.xdist_group("quality")
def test_on_the_demo_model_aqua_beats_the_mean_and_the_mean_beats_nothing():
    recipes = ("aqua-2bit", "mean-higgs-2bit")
    run(Job("demo", recipes, samples=16, seq_len=512, threads=1, evaluate=False))
    files = models.resolve("demo")
    batch = corpus.select("demo", files.path, 8, 512, split="held-out")
    found = scores(files, batch, ["demo-aqua-2bit", "demo-mean-higgs-2bit", "higgs-2bit"])
    aqua, mean, plain = found.values()
    assert aqua.kl < mean.kl / 3 and mean.kl < plain.kl
    assert aqua.perplexity < mean.perplexity < plain.perplexity
