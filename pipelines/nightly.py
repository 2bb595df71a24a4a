"""Calibrate a list of models, every recipe of each, every night.

Where nothing changed (code, model, text, settings) the bytes are the same, and so is the version: a quiet night
publishes nothing. One model's failure does not keep the next from its turn; the run then fails with all reasons.
"""

from prefect import flow
from prefect.states import Failed, State

from kvq_calib.flow.flow import calibrated
from kvq_calib.job.job import Job
from pipelines import parameters as p


@flow(name="nightly", persist_result=False)
def nightly(
    models: p.Models,
    recipes: p.Recipes = ["aqua-2bit"],  # noqa: B006  (Prefect shows it, and nothing changes it)
    corpus: p.Corpus = None,
    samples: p.Samples = None,
    seq_len: p.Length = None,
    seed: p.Seed = 0,
    device: p.Device = "cpu",
    checkpoint_every: p.CheckpointEvery = None,
    registry: p.Registry = None,
    push: p.Push = None,
    eval_windows: p.Windows = None,
    also: p.Also = None,
    max_perplexity_ratio: p.PerplexityRatio = None,
    max_kl: p.Divergence = None,
    timeout_hours: p.TimeoutHours = 8,
) -> list[dict] | State:
    """Fit, measure, publish: each model in turn."""
    settings = {name: value for name, value in locals().items() if name not in ("models", "timeout_hours")}
    rows, reasons = [], []
    for model in models:
        try:
            done = calibrated(Job.from_settings(model=model, **settings), 3600 * timeout_hours)
            rows += [artifact.record() for artifact in done]
        except Exception as error:  # whatever it was, the next model gets its turn
            reasons.append(f"{model}: {error}")
    return Failed(message="; ".join(reasons)) if reasons else rows
