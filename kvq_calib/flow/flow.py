"""The stage graph as a Prefect flow: functions of `run.py` and `job.py`, a task a layer.

Checkpoints in the run folder are the only truth for resuming, so Prefect's caching is off; tasks pass paths and names,
never tensors. Where no Prefect server is configured, one is started for this process: see `flow_server`.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice
from uuid import UUID

from kvq_calib import flow_server

for _name, _value in flow_server.QUIET.items():  # read by prefect when it is imported
    os.environ.setdefault(_name, _value)

from prefect import flow, tags, task  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.exceptions import FailedRun  # noqa: E402
from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: E402
from prefect.states import Failed  # noqa: E402

from kvq_calib import budget, checkpoint, flow_reaper, flow_shown, job  # noqa: E402
from kvq_calib import run as graph  # noqa: E402
from kvq_calib.gate import Refused  # noqa: E402

GATE_FAILED = "GateFailed"  # the name of the state, and so of the event prefect.flow-run.GateFailed


def _work(asked: job.Job, listener: graph.Listener = lambda progress: None) -> graph.Run:
    files, plan = asked.prepare()
    return graph.Run(plan, files, asked.folder(plan), listener)


def _round(work: graph.Run, number: int) -> graph.Run | None:
    """A round of the run, when those before it are finished; None where a budget needs no such round."""
    return next(islice(budget.rounds(work), number, None), None)


def _published(asked: job.Job) -> list[job.Done]:
    """Publish what was fitted and measured. Neither is done a second time, nor is what was published before."""
    work = _work(asked)
    fitted = graph.artifacts(work)
    return list(job.publish(asked, work, fitted, job.evaluate(asked, work, fitted)))


@task(name="prepare", task_run_name="prepare-{number}", cache_policy=NO_CACHE, persist_result=False)
def prepare(asked: job.Job, number: int) -> int | None:
    """Check what would stop the round, choose the texts, and say at which layer it goes on; None: there is none."""
    work = _round(_work(asked), number)
    if work is None:
        return None
    job.preflight(asked, work.files, work.plan)
    job.begin(asked, work) if number == 0 else graph.start(work)
    return graph.first_unfinished(work)


@task(name="layer", task_run_name="layer-{layer}-{number}", cache_policy=NO_CACHE, persist_result=False)
def layer(asked: job.Job, layer: int, number: int, progress: UUID) -> None:
    """Capture one layer and fit every recipe of the round in it."""
    shown = flow_shown.Shown(progress, asked.model)
    work = _round(_work(asked, shown), number)
    assert work is not None, "prepare has seen it"
    graph.fit_layer(work, graph.start(work), layer)
    shown.finished(layer, work.plan.geometry.layers)


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(asked: job.Job, progress: UUID) -> None:
    """Measure what was fitted on held-out text; the records are kept in the run folder."""
    work = _work(asked, flow_shown.Shown(progress, asked.model))
    job.evaluate(asked, work, graph.artifacts(work))


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(asked: job.Job) -> list[job.Done]:
    """Put the artifacts together and publish those that keep the bounds."""
    done = _published(asked)
    flow_shown.made(asked, done, _work(asked).folder)
    return done


@flow(name="kvq-calibrate", flow_run_name="{asked[model]}", validate_parameters=False, persist_result=False)
def calibrate(asked: dict) -> Sequence[job.Done] | State:
    """Calibrate a model and publish its artifacts; `asked` holds the fields of a Job.

    Where an artifact does not keep its bounds the run ends in the state GateFailed, which says why.
    """
    tuples = {name: tuple(asked.get(name, ())) for name in ("recipes", "bits", "baselines")}
    given = job.Job(**{**asked, **tuples})
    _, plan = given.prepare()
    given = replace(given, corpus=plan.corpus, revision=plan.revision)
    with checkpoint.claimed(given.folder(plan)):
        flow_reaper.bury(_tag(given))
        progress = flow_shown.begun(given.model)
        for number in range(budget.ROUNDS if plan.budgets else 1):
            first = prepare(given, number)
            if first is None:
                break
            for one in range(first, plan.geometry.layers):
                layer(given, one, number, progress)
        if given.evaluate:
            evaluate(given, progress)
        done = publish(given)
    if any(made.failed for made in done):
        refused = Refused(done)
        return Failed(name=GATE_FAILED, message=str(refused), data=refused)
    return done


def run(asked: job.Job) -> tuple[list[job.Done], dict[str, float]]:
    """Run the flow from this process; what it made, published or not, and seconds by stage."""
    try:
        done = calibrated(asked)
    except Refused as refused:
        done = refused.done
    return done, graph.seconds(_work(asked))


def calibrated(asked: job.Job, timeout_seconds: float | None = None) -> list[job.Done]:
    """Run the flow from this process, or as a part of another flow; what it made. Raises Refused where a gate failed.

    timeout_seconds   after which the run fails; its retry goes on where it stopped
    """
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(asked).items()}
    timed = calibrate if timeout_seconds is None else calibrate.with_options(timeout_seconds=timeout_seconds)
    own = nullcontext() if PREFECT_API_URL.value() else temporary_settings({PREFECT_API_URL: flow_server.address()})
    with own, tags(_tag(asked)):
        try:
            done = timed(given)
        except FailedRun:  # the gate's state without what we put into it: the server's, after an answer was lost
            raise Refused(_published(asked)) from None
    assert not isinstance(done, State), "a failed state is raised"
    return list(done)


def _tag(asked: job.Job) -> str:
    """What flow runs of one run folder have in common, on whichever machine shares it."""
    _, plan = asked.prepare()
    folder = asked.folder(plan).absolute()
    return f"run-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
