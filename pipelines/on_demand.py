"""Calibrate one model on demand."""

from prefect import flow

from kvq_calib.flow.flow import calibrated
from kvq_calib.job.job import Job
from pipelines import parameters as p


@flow(name="on-demand", flow_run_name="{model}", persist_result=False)
def on_demand(
    model: p.Model,
    recipes: p.Recipes = ["aqua-2bit"],  # noqa: B006  (Prefect shows it, and nothing changes it)
    bits: p.Bits = [],  # noqa: B006
    revision: p.Revision = None,
    corpus: p.Corpus = None,
    samples: p.Samples = None,
    seq_len: p.Length = None,
    seed: p.Seed = 0,
    device: p.Device = "cpu",
    checkpoint_every: p.CheckpointEvery = None,
    registry: p.Registry = None,
    push: p.Push = None,
    name: p.Name = None,
    version: p.Version = None,
    eval_windows: p.Windows = None,
    also: p.Also = None,
    baselines: p.Baselines = [],  # noqa: B006
    max_perplexity_ratio: p.PerplexityRatio = None,
    max_kl: p.Divergence = None,
    timeout_hours: p.TimeoutHours = 24,
) -> list[dict]:
    """Fit, measure, publish. An artifact that does not keep the bounds is not published, and the run fails with why."""
    settings = {name: value for name, value in locals().items() if name != "timeout_hours"}
    done = calibrated(Job.from_settings(**settings), 3600 * timeout_hours)
    return [artifact.record() for artifact in done]
