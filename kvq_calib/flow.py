"""The stage graph as a Prefect flow: functions of `run.py` and `job.py`, a task a layer. Only importer of prefect.

Checkpoints in the run folder are the only truth for resuming, so Prefect's caching is off; tasks pass paths and names,
never tensors. Where PREFECT_API_URL is not set, Prefect starts a server of its own for the length of the run.
"""

import os
from dataclasses import asdict, replace
from itertools import islice

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}
for _name, _value in _QUIET.items():  # read by prefect when it is imported
    os.environ.setdefault(_name, _value)

from prefect import flow, task  # noqa: E402
from prefect.artifacts import create_table_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402

from kvq_calib import budget, checkpoint, job  # noqa: E402
from kvq_calib import run as graph  # noqa: E402


def _work(asked: job.Job) -> graph.Run:
    files, plan = asked.prepare()
    return graph.Run(plan, files, asked.folder(plan))


def _round(asked: job.Job, number: int) -> graph.Run | None:
    """A round of the run, when those before it are finished; None where a budget needs no such round."""
    return next(islice(budget.rounds(_work(asked)), number, None), None)


@task(name="prepare", task_run_name="prepare-{number}", cache_policy=NO_CACHE, persist_result=False)
def prepare(asked: job.Job, number: int) -> int | None:
    """Check what would stop the round, choose the texts, and say at which layer it goes on; None: there is none."""
    work = _round(asked, number)
    if work is None:
        return None
    job.preflight(asked, work.files, work.plan)
    job.begin(asked, work) if number == 0 else graph.start(work)
    return graph.first_unfinished(work)


@task(name="layer", task_run_name="layer-{layer}-{number}", cache_policy=NO_CACHE, persist_result=False)
def layer(asked: job.Job, layer: int, number: int) -> None:
    """Capture one layer and fit every recipe of the round in it."""
    work = _round(asked, number)
    assert work is not None, "prepare has seen it"
    graph.fit_layer(work, graph.start(work), layer)


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(asked: job.Job) -> None:
    """Measure what was fitted on held-out text; the records are kept in the run folder."""
    work = _work(asked)
    job.evaluate(asked, work, graph.artifacts(work))


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(asked: job.Job) -> list[dict]:
    """Put the artifacts together and publish those that keep the bounds."""
    work = _work(asked)
    fitted = graph.artifacts(work)
    done = list(job.publish(asked, work, fitted, job.evaluate(asked, work, fitted)))  # which repeats nothing
    create_table_artifact(table=[made.row() for made in done], key="kvq-artifacts", description="What was made")
    return [asdict(made) for made in done]


@flow(name="kvq-calibrate", validate_parameters=False)
def calibrate(asked: dict) -> list[dict]:
    """Calibrate a model and publish its artifacts; `asked` holds the fields of a Job."""
    tuples = {name: tuple(asked.get(name, ())) for name in ("recipes", "bits", "baselines")}
    given = job.Job(**{**asked, **tuples})
    _, plan = given.prepare()
    given = replace(given, corpus=plan.corpus, revision=plan.revision)
    with checkpoint.claimed(given.folder(plan)):
        for number in range(budget.ROUNDS if plan.budgets else 1):
            first = prepare(given, number)
            if first is None:
                break
            for one in range(first, plan.geometry.layers):
                layer(given, one, number)
        if given.evaluate:
            evaluate(given)
        return publish(given)


def run(asked: job.Job) -> tuple[list[job.Done], dict[str, float]]:
    """Run the flow from this process; what it made, and seconds by stage."""
    made = calibrate(asdict(asked))
    return [job.Done(**one) for one in made], graph.seconds(_work(asked))
