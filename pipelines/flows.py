"""The flows of `flows.yaml`: calibrate one model on demand, or a list every night; check for drift every week."""

from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import State
from pydantic import TypeAdapter, ValidationError

from kvq_calib.evaluate import quality_checks
from kvq_calib.evaluate.quality_checks import DriftCheck, DriftResult
from kvq_calib.flow.flow import calibrated, failed
from kvq_calib.job.job import Job
from kvq_runtime.cli.table import percent
from kvq_runtime.errors import spoken

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
    return _calibrate([{"model": model, "recipes": recipes, **settings}], timeout_hours)


@flow(name="nightly", persist_result=False)
def nightly(jobs: list[Any], timeout_hours: float = 8) -> list[dict] | State:
    """Fit, measure and publish a list of models, one after the other.

    Equal code, model, text and settings give equal bytes: a night without changes publishes nothing. A wrong entry is
    reported at the start. Neither it nor a model that fails stops the next; the run then fails with all reasons.

    Args:
        jobs: settings of each job (kvq_calib/job/job.py): model, and recipes, corpus, samples, seq_len, device,
            registry, max_perplexity_ratio and others where the defaults do not suit
        timeout_hours: hours after which a model's run fails
    """
    return _calibrate(jobs, timeout_hours)


def _calibrate(jobs: list[Any], timeout_hours: float) -> list[dict] | State:
    done, reasons = _each(Job, jobs, lambda job: calibrated(job, 3600 * timeout_hours))
    return failed("; ".join(reasons)) if reasons else [made.record() for made in done]


measure = task(name="measure", cache_policy=NO_CACHE, persist_result=False)(quality_checks.check_drift)


@flow(name="drift", persist_result=False)
def drift(checks: list[Any]) -> list[str] | State:
    """Measure published versions on fresh text; their records go to the registry. The run ends as Drifted if one
    exceeds a bound.

    Args:
        checks: settings of each check (kvq_calib/evaluate/quality_checks.py): model and artifacts, and corpus, windows,
            seed, alias, registry, max_perplexity_ratio and others where the defaults do not suit
    """
    results, reasons = _each(DriftCheck, checks, measure)
    create_table_artifact([_row(result) for result in results], key="kvq-drift", description="Drift")
    drifted = [f"{result.artifact} has drifted. {reason}" for result in results for reason in result.failed]
    if drifted or reasons:
        return failed("; ".join([*drifted, *reasons]), name=DRIFTED if drifted else None)
    return [result.artifact for result in results]


def _row(result: DriftResult) -> dict[str, Any]:
    """Return a line of the table of a drift check."""
    perplexity = "not measured" if result.perplexity is None else percent(result.perplexity - 1)
    row = {"artifact": result.artifact, "perplexity": perplexity, "protocol": result.protocol}
    return row | {"KL": result.kl, "failed": "; ".join(result.failed)}


def _each(kind: type, entries: list[Any], work: Callable[[Any], Sequence[Any]]) -> tuple[list, list[str]]:
    """Check all entries of a list, then work on each valid one; return all results, and the reasons of failures."""
    valid, results, reasons = [], [], list[str]()
    for number, entry in enumerate(entries, 1):
        name = (isinstance(entry, dict) and entry.get("model")) or f"entry {number}"
        try:
            settings = TypeAdapter(kind).validate_python(entry)
            settings.check()
            valid.append((name, settings))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            reasons.append(f"{name}: {'; '.join(wrong)}")
        except (ValueError, OSError, RuntimeError) as error:
            reasons.append(f"{name}: {spoken(error)}")
    if reasons:
        get_run_logger().error("; ".join(reasons))
    for name, settings in valid:
        try:
            results += work(settings)
        except Exception as error:  # whatever it was, the next entry gets its turn
            get_run_logger().exception(f"{name}: {spoken(error)}")
            reasons.append(f"{name}: {spoken(error)}")
    return results, reasons
