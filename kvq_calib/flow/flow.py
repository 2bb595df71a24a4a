"""A calibration as a Prefect flow, one task a layer.

Checkpoints in the run folder are the only truth for resuming, so Prefect's caching is off; tasks get the job and
numbers, never tensors. Without a configured Prefect server, a temporary one is started for this process.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from kvq_calib.flow import server

server.apply_settings()

from prefect import flow, get_run_logger, task  # noqa: E402
from prefect.artifacts import (  # noqa: E402
    create_link_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.exceptions import FailedRun  # noqa: E402
from prefect.settings import PREFECT_API_URL  # noqa: E402
from prefect.states import Failed  # noqa: E402

from kvq_calib.job import prepare as preparation  # noqa: E402
from kvq_calib.job import run as jobs  # noqa: E402
from kvq_calib.job.job import Job  # noqa: E402
from kvq_calib.job.run import Published, PublishedAt  # noqa: E402
from kvq_calib.run import bit_allocation  # noqa: E402
from kvq_calib.run import calibrate as stages  # noqa: E402
from kvq_calib.run.run import InFiles, Listener, Progress, Run, silent  # noqa: E402
from kvq_runtime.cli.exit_codes import exit_code  # noqa: E402
from kvq_runtime.registry import reference  # noqa: E402
from kvq_runtime.registry.rating import Refused  # noqa: E402


def _brief(record: logging.LogRecord) -> bool:
    """Log refusals without their tracebacks, as the command line prints them, unless PREFECT_LOGGING_LEVEL is DEBUG."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, Exception) and exit_code(error) and logging.getLogger("prefect").level != logging.DEBUG:
        record.exc_info = None
    return True


for _name in ("flow_runs", "task_runs", "engine"):
    logging.getLogger(f"prefect.{_name}").addFilter(_brief)

INTERVAL = 5.0  # seconds between two updates of a layer's progress
GATE_FAILED = "GateFailed"  # the name of the state, and so of the event prefect.flow-run.GateFailed

_prepared: dict[Job, Run] = {}  # runs of the flows that this process runs: their tasks prepare nothing again


@contextmanager
def _sharing(job: Job, work: Run) -> Iterator[None]:
    """Give a run to every task of its job."""
    before = dict(_prepared)
    _prepared[job] = work
    try:
        yield
    finally:
        _prepared.clear()
        _prepared.update(before)


def _work(job: Job, listener: Listener = silent) -> Run:
    """Return the shared run of a job; in a task that was started alone a new one, which leaves files to the next."""
    if job in _prepared:
        return replace(_prepared[job], listener=listener)
    return replace(preparation.prepare(job), listener=listener, activations=InFiles())


def _round(work: Run, number: int) -> Run | None:
    """Return a round of the run, after those before it are finished; None if there is no such round."""
    return next(islice(bit_allocation.rounds(work), number, None), None)


@task(name="prepare", task_run_name="prepare-{number}", cache_policy=NO_CACHE, persist_result=False)
def prepare(job: Job, number: int) -> int | None:
    """Check what would stop the round, and choose the texts; return the layer to go on with, or None after the last
    round."""
    work = _round(_work(job), number)
    if work is None:
        return None
    preparation.preflight(job, work)
    if number == 0:
        jobs.begin(job, _work(job))
    stages.start(work)
    return stages.first_unfinished(work)


@task(name="layer", task_run_name="layer-{layer}-{number}", cache_policy=NO_CACHE, persist_result=False)
def layer(job: Job, layer: int, number: int, progress: UUID) -> None:
    """Capture one layer and fit every recipe of the round in it."""
    listener = ProgressArtifact(progress, job.model)
    work = _round(_work(job, listener), number)
    assert work is not None, "prepare has found this round"
    stages.fit_layer(work, stages.start(work), layer)
    listener.show((layer + 1) / work.plan.geometry.layers, f"{layer + 1} of {work.plan.geometry.layers} layers")


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(job: Job, progress: UUID) -> None:
    """Measure the artifacts on held-out text; the run folder keeps the records."""
    work = _work(job, ProgressArtifact(progress, job.model))
    jobs.evaluate(job, work, stages.artifacts(work))


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(job: Job) -> list[Published]:
    """Assemble the artifacts, publish those that keep the bounds, and show them."""
    done = _publish(job)
    rows = [made.row() | {"not published": "; ".join(made.failed)} for made in done]
    create_table_artifact(rows, key="kvq-artifacts", description=f"Artifacts of {job.model}")
    for place in (place for made in done for place in made.places):
        create_link_artifact(_link(place), key="kvq-version", link_text=place.reference)
    return done


def _publish(job: Job) -> list[Published]:
    """Publish what was fitted and evaluated. Neither is repeated, nor is an earlier publication."""
    work = _work(job)
    fitted = stages.artifacts(work)
    return jobs.publish(job, work, fitted, jobs.evaluate(job, work, fitted))


@flow(name="kvq-calibrate", flow_run_name="{settings[model]}", validate_parameters=False, persist_result=False)
def calibrate(settings: dict) -> Sequence[Published] | State:
    """Calibrate a model and publish its artifacts; `settings` are those of a Job.

    If an artifact exceeds its bounds the run ends in the state GateFailed, with the reason, also in its log.
    """
    job = Job(**settings)
    work = _work(job)
    job = replace(job, corpus=work.plan.corpus, revision=work.plan.revision)
    with work.claimed(), _sharing(job, work):
        progress: Any = create_progress_artifact(0.0, "kvq-progress", f"{job.model}: preparing")
        for number in range(bit_allocation.count_rounds(work.plan)):
            first = prepare(job, number)
            if first is None:
                break
            for index in range(first, work.plan.geometry.layers):
                layer(job, index, number, progress)
        if job.evaluate:
            evaluate(job, progress)
        done = publish(job)
    if any(made.failed for made in done):
        refused = Refused(done)
        return failed(str(refused), name=GATE_FAILED, data=refused)
    return done


def failed(message: str, **state: Any) -> State:
    """Return a failed state, and log its reason: Prefect logs only what was raised."""
    get_run_logger().error(message)
    return Failed(message=message, **state)


def run(job: Job, work: Run | None = None) -> tuple[list[Published], dict[str, float]]:
    """Run the flow from this process; return its artifacts, published or not, and seconds by stage."""
    work = work or preparation.prepare(job)
    try:
        done = calibrated(job, work=work)
    except Refused as refused:
        done = refused.done
    return done, stages.seconds(work)


def calibrated(job: Job, timeout_seconds: float | None = None, work: Run | None = None) -> list[Published]:
    """Run the flow from this process, or as a part of another flow; return its artifacts.

    timeout_seconds   after which the run fails; its retry resumes
    work              the run of the job, if it is prepared already
    Raises Refused if an artifact exceeds its bounds.
    """
    work = work or preparation.prepare(job)
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(job).items()}
    timed = calibrate if timeout_seconds is None else calibrate.with_options(timeout_seconds=timeout_seconds)
    with nullcontext() if PREFECT_API_URL.value() else server.temporary_server(), _sharing(job, work):
        try:
            done = timed(settings)
        except FailedRun:  # the gate's state as the server has it, without our data, after an answer was lost
            raise Refused(_publish(job)) from None
    assert not isinstance(done, State), "a failed state is raised"
    return list(done)


class ProgressArtifact:
    """A progress listener that updates a progress artifact: at the start of each layer, then every 5 s.

    Per cent are of the layers of a round, then of the evaluation.
    """

    def __init__(self, artifact: UUID, model: str):
        self._artifact, self._model = artifact, model
        self._at, self._last = (0, -2), 0.0

    def __call__(self, progress: Progress) -> None:
        now, at = time.monotonic(), (progress.round, progress.layer)
        if at == self._at and now - self._last < INTERVAL and (progress.layer >= 0 or progress.done < progress.total):
            return
        self._at, self._last = at, now
        if progress.layer < 0:
            self.show(progress.done / progress.total, progress.stage)
        else:
            where = f"layer {progress.layer + 1} of {progress.layers}, {progress.stage}"
            again = f"round {progress.round}, " if progress.round else ""
            self.show(progress.layer / progress.layers, again + where)

    def show(self, done: float, text: str) -> None:
        """Show a text, and the fraction that is done."""
        update_progress_artifact(self._artifact, 100 * done, f"{self._model}: {text}")


def _link(place: PublishedAt) -> str:
    """Return the address of a version: its file, or its page on the Hub."""
    if place.path is not None:
        return Path(place.path).as_uri()
    from huggingface_hub import constants

    version = reference.parse(place.reference)
    assert isinstance(version, reference.Reference), "what is published on a Hub has a reference"
    repository = f"{reference.kind_and_root(place.registry)[1]}/{version.name}"
    return f"{constants.ENDPOINT}/{repository}/tree/main/versions/{version.value}"
