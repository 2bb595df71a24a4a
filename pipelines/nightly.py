"""Calibrate a list of models, every recipe of each, every night.

Where nothing changed (code, model, text, settings) the bytes are the same, and so is the version: a quiet night
publishes nothing. One model's failure does not keep the next from its turn; the run then fails with all reasons.
"""

from prefect import flow
from prefect.states import Failed, State

from kvq_calib.flow import calibrated
from kvq_calib.job import Job
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
    registry: p.Registry = None,
    push: p.Push = None,
    eval_windows: p.Windows = None,
    max_perplexity_ratio: p.PerplexityRatio = None,
    max_kl: p.Divergence = None,
    timeout_hours: p.TimeoutHours = 8,
) -> list[dict] | State:
    """Fit, measure, publish: each model in turn."""
    rows, reasons = [], []
    for model in models:
        asked = Job(
            model=model,
            recipes=tuple(recipes),
            corpus=corpus,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            device=device,
            registry=registry,
            push=push,
            eval_windows=eval_windows,
            max_perplexity_ratio=max_perplexity_ratio,
            max_kl=max_kl,
        )
        try:
            rows += [made.row(full=True) for made in calibrated(asked, 3600 * timeout_hours)]
        except Exception as error:  # whatever it was, the next model gets its turn
            reasons.append(f"{model}: {error}")
    return Failed(message="; ".join(reasons)) if reasons else rows
