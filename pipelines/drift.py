"""Measure published artifacts on fresh text, once a week; fail, and promote nothing, where one has got worse."""

from datetime import UTC, datetime

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed, State

from kvq_calib.evaluate import drift as measure
from kvq_calib.evaluate.gate import Bounds
from kvq_calib.flow import token
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.reference import PRODUCTION
from pipelines import parameters as p

DRIFTED = "Drifted"  # the name of the state, and so of the event prefect.flow-run.Drifted

check = task(name="measure", cache_policy=NO_CACHE, persist_result=False)(token.publishing()(measure.check))


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
    text_seed = measure.week(datetime.now(UTC).date()) if seed is None else seed
    bounds = Bounds(max_perplexity_ratio, max_kl)
    checked = check(
        artifacts, model, corpus or "demo", bounds, text_seed, windows or 16, length, alias, promote, device, registry
    )
    rows = [
        {
            "artifact": result.artifact,
            "perplexity": "not measured" if result.perplexity is None else percent(result.perplexity - 1),
            "protocol": result.protocol,
            "KL": result.kl,
            "failed": "; ".join(result.failed),
            "promoted": result.promoted,
        }
        for result in checked
    ]
    create_table_artifact(rows, key="kvq-drift", description=f"{model} on {corpus}, seed {text_seed}")
    drifted = [f"{result.artifact} has drifted. {reason}" for result in checked for reason in result.failed]
    if drifted:
        return Failed(name=DRIFTED, message="; ".join(drifted))
    return [result.artifact for result in checked]
