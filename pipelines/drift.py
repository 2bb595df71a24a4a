"""Measure what is published on fresh text, once a week; tell somebody, and promote nothing, where it has got worse."""

from datetime import UTC, datetime

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed, State

from kvq_calib import drift as measure
from kvq_calib.gate import Bounds
from kvq_runtime.reference import PRODUCTION
from pipelines import parameters as p

DRIFTED = "Drifted"  # the name of the state, and so of the event prefect.flow-run.Drifted
check = task(name="measure", cache_policy=NO_CACHE, persist_result=False)(measure.check)


@flow(name="drift", flow_run_name="{model}", persist_result=False)
def drift(
    artifacts: p.Artifacts,
    model: p.Model,
    corpus: p.Corpus,
    windows: p.Windows = 16,
    length: p.Length = None,
    seed: p.WeekSeed = None,
    alias: p.Alias = PRODUCTION,
    promote: p.Promote = False,
    device: p.Device = "cpu",
    registry: p.Registry = None,
    max_perplexity_ratio: p.PerplexityRatio = 1.05,
    max_kl: p.Divergence = None,
) -> list[str] | State:
    """Measure published versions; their records go to the registry. The run ends as Drifted where one is too bad."""
    chosen = measure.week(datetime.now(UTC).date()) if seed is None else seed
    bounds = Bounds(max_perplexity_ratio, max_kl)
    checked = check(
        artifacts, model, corpus or "demo", bounds, chosen, windows or 16, length, alias, promote, device, registry
    )
    rows = [
        {
            "artifact": one.artifact,
            "perplexity": f"{one.perplexity - 1:+.2%}",
            "KL": one.kl,
            "failed": "; ".join(one.failed),
            "promoted": one.promoted,
        }
        for one in checked
    ]
    create_table_artifact(rows, key="kvq-drift", description=f"{model} on {corpus}, seed {chosen}")
    bad = [f"{one.artifact} has drifted. {reason}" for one in checked for reason in one.failed]
    if bad:
        return Failed(name=DRIFTED, message="; ".join(bad))
    return [one.artifact for one in checked]
