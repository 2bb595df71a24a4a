"""The flows of `flows.yaml`: calibrate one model on demand, or several every night; check for drift every week."""

from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from kvq_calib.evaluate import quality_checks
from kvq_calib.flow.flow import calibrated, failed
from kvq_calib.job.job import Job
from kvq_calib.model import catalog
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.rating import Bounds, Refused
from kvq_runtime.registry.reference import PRODUCTION

DRIFTED = "Drifted"  # the name of the state, and so of the event prefect.flow-run.Drifted


@flow(name="on-demand", flow_run_name="{model}", persist_result=False)
def on_demand(
    model: str,
    recipes: list[str] = ["aqua-2bit"],  # noqa: B006  (Prefect shows it, and nothing changes it)
    settings: dict[str, Any] = {},  # noqa: B006
    timeout_hours: float = 24,
) -> list[dict] | State:
    """Fit, measure and publish. The run fails with the reason if an artifact exceeds its bounds.

    Args:
        model: a name of `kvq-calibrate --list-models`, a folder, or org/name on the Hub
        recipes: recipes to fit, all in one pass over the model: `kvq recipes`
        settings: other settings of a job (kvq_calib/job/job.py), as corpus, device, registry or max_perplexity_ratio
        timeout_hours: hours after which the run fails; its retry resumes
    """
    job = Job(model=model, recipes=recipes, **settings)
    try:
        done = calibrated(job, 3600 * timeout_hours)
    except Refused as refused:  # no fault of the code: without its traceback
        return failed(str(refused), data=refused)
    return [made.record() for made in done]


@flow(name="nightly", persist_result=False)
def nightly(
    models: list[str],
    recipes: list[str] = ["aqua-2bit"],  # noqa: B006
    settings: dict[str, Any] = {},  # noqa: B006
    timeout_hours: float = 8,
) -> list[dict] | State:
    """Fit, measure and publish each model in turn.

    Equal code, model, text and settings give equal bytes: a night without changes publishes nothing. A model that fails
    does not stop the next; the run then fails with all reasons. Names that mean no model are reported at the start.

    Args:
        models: catalog names, folders or Hub ids
        recipes: recipes to fit, all in one pass over each model
        settings: other settings of a job (kvq_calib/job/job.py), as corpus, device, registry or max_perplexity_ratio
        timeout_hours: hours after which a model's run fails
    """
    rows, reasons, known = [], [], []
    for model in models:
        try:
            catalog.check(model)
            known.append(model)
        except ValueError as error:
            reasons.append(f"{model}: {error}")
    if reasons:
        get_run_logger().error("; ".join(reasons))
    for model in known:
        try:
            done = calibrated(Job(model=model, recipes=recipes, **settings), 3600 * timeout_hours)
            rows += [made.record() for made in done]
        except Exception as error:  # whatever it was, the next model gets its turn
            reasons.append(f"{model}: {error}")
    return failed("; ".join(reasons)) if reasons else rows


check = task(name="measure", cache_policy=NO_CACHE, persist_result=False)(quality_checks.check_drift)


@flow(name="drift", flow_run_name="{model}", persist_result=False)
def drift(
    artifacts: list[str],
    model: str,
    corpus: str = "demo",
    windows: int = 16,
    length: int | None = None,
    seed: int | None = None,
    alias: str = PRODUCTION,
    device: str = "cpu",
    registry: str | None = None,
    max_perplexity_ratio: float | None = 1.05,
    max_kl: float | None = None,
    max_beyond: float | None = None,
) -> list[str] | State:
    """Measure published versions on fresh text; their records go to the registry. The run ends as Drifted if one
    exceeds a bound.

    Args:
        artifacts: names in the registry, all of one model
        model: a catalog name, a folder or a Hub id
        corpus: .txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]
        windows: windows of held-out text to measure on
        length: tokens of a window; empty: the model's
        seed: of the choice of text; empty: another one every week
        alias: the alias whose version is measured; the newest version if it points to none
        device: cpu, cuda, cuda:1
        registry: file:///folder or hf://org; empty: $KVQ_REGISTRY, else $KVQ_HOME/registry
        max_perplexity_ratio: bound on the perplexity of a full encode over that of 16 bit
        max_kl: bound on the KL divergence of a full encode from 16 bit, nats per token
        max_beyond: bound on the share of blocks with errors beyond the calibration's
    """
    text_seed = quality_checks.week(datetime.now(UTC).date()) if seed is None else seed
    bounds = Bounds(max_perplexity_ratio, max_kl, max_beyond)
    checked = check(artifacts, model, corpus, bounds, text_seed, windows, length, alias, device, registry)
    rows = [
        {
            "artifact": result.artifact,
            "perplexity": "not measured" if result.perplexity is None else percent(result.perplexity - 1),
            "protocol": result.protocol,
            "KL": result.kl,
            "failed": "; ".join(result.failed),
        }
        for result in checked
    ]
    create_table_artifact(rows, key="kvq-drift", description=f"{model} on {corpus}, seed {text_seed}")
    drifted = [f"{result.artifact} has drifted. {reason}" for result in checked for reason in result.failed]
    if drifted:
        return failed("; ".join(drifted), name=DRIFTED)
    return [result.artifact for result in checked]
