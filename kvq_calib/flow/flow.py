"""The stages of a calibration as a Prefect flow: functions of `run/calibrate.py` and `job/`, one task a layer.

Checkpoints in the run folder are the only truth for resuming, so Prefect's caching is off; tasks get the job and
numbers, never tensors. Where no Prefect server is configured, one is started for this process: see `server.py`.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from kvq_calib.flow import server as flow_server

for _name, _value in flow_server.QUIET.items():  # read by prefect when it is imported
    os.environ.setdefault(_name, _value)

from prefect import flow, get_run_logger, tags, task  # noqa: E402
from prefect.artifacts import (  # noqa: E402
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402
from prefect.client.schemas.filters import FlowRunFilter  # noqa: E402
from prefect.client.schemas.objects import FlowRun, State  # noqa: E402
from prefect.exceptions import FailedRun  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings  # noqa: E402
from prefect.states import Crashed, Failed  # noqa: E402

from kvq_calib.job import prepare as preparation  # noqa: E402
from kvq_calib.job import run as job  # noqa: E402
from kvq_calib.job.job import Job  # noqa: E402
from kvq_calib.report import plots  # noqa: E402
from kvq_calib.report.published import Place, Published  # noqa: E402
from kvq_calib.run import budget  # noqa: E402
from kvq_calib.run import calibrate as stages  # noqa: E402
from kvq_calib.run.run import InFiles, Listener, Progress, Run, silent  # noqa: E402
from kvq_runtime.registry import reference  # noqa: E402
from kvq_runtime.registry.evaluation_records import TextRecord, parse  # noqa: E402
from kvq_runtime.registry.rating import Refused  # noqa: E402

DIED = "Its process ended without a word; another run has taken its folder over, and goes on where it stopped."
EVERY = 5.0  # seconds between two updates of what one layer's progress shows
GATE_FAILED = "GateFailed"  # the name of the state, and so of the event prefect.flow-run.GateFailed

_prepared: dict[Job, Run] = {}  # while a flow is run from this process: its tasks prepare nothing again


@contextmanager
def _sharing(asked: Job, work: Run) -> Iterator[None]:
    """Give this run to every task of the job, for as long as this is entered."""
    before = dict(_prepared)
    _prepared[asked] = work
    try:
        yield
    finally:
        _prepared.clear()
        _prepared.update(before)


def _work(asked: Job, listener: Listener = silent) -> Run:
    """The run of a job: the one that is shared, or a new one, which leaves files to the next, where a task has been
    started alone."""
    if asked in _prepared:
        return replace(_prepared[asked], listener=listener)
    return replace(preparation.prepare(asked), listener=listener, activations=InFiles())


def _round(work: Run, number: int) -> Run | None:
    """A round of the run, when those before it are finished; None where a budget needs no such round."""
    return next(islice(budget.rounds(work), number, None), None)


def _publish(asked: Job) -> list[Published]:
    """Publish what was fitted and evaluated. Neither is done a second time, nor is what was published before."""
    work = _work(asked)
    fitted = stages.artifacts(work)
    return job.publish(asked, work, fitted, job.evaluate(asked, work, fitted))


@task(name="prepare", task_run_name="prepare-{number}", cache_policy=NO_CACHE, persist_result=False)
def prepare(asked: Job, number: int) -> int | None:
    """Check what would stop the round, choose the texts; the layer to go on with. None: there is no such round."""
    work = _round(_work(asked), number)
    if work is None:
        return None
    preparation.preflight(asked, work)
    if number == 0:
        job.begin(asked, _work(asked))
    stages.start(work)
    return stages.first_unfinished(work)


@task(name="layer", task_run_name="layer-{layer}-{number}", cache_policy=NO_CACHE, persist_result=False)
def layer(asked: Job, layer: int, number: int, progress: UUID) -> None:
    """Capture one layer and fit every recipe of the round in it."""
    listener = ProgressArtifact(progress, asked.what.model)
    work = _round(_work(asked, listener), number)
    assert work is not None, "prepare has found this round"
    stages.fit_layer(work, stages.start(work), layer)
    listener.finished(layer, work.plan.geometry.layers)


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(asked: Job, progress: UUID) -> None:
    """Measure the artifacts on held-out text; the records are kept in the run folder."""
    work = _work(asked, ProgressArtifact(progress, asked.what.model))
    job.evaluate(asked, work, stages.artifacts(work))


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(asked: Job) -> list[Published]:
    """Put the artifacts together and publish those that keep the bounds."""
    done = _publish(asked)
    _show_results(asked, done, _work(asked).folder)
    return done


@flow(name="kvq-calibrate", flow_run_name="{asked[model]}", validate_parameters=False, persist_result=False)
def calibrate(asked: dict) -> Sequence[Published] | State:
    """Calibrate a model and publish its artifacts; `asked` holds the settings of a Job.

    Where an artifact does not keep its bounds the run ends in the state GateFailed, with the reason, also in its log.
    """
    requested = Job.from_settings(**asked)
    work = _work(requested)
    pinned = requested.with_settings(corpus=work.plan.corpus, revision=work.plan.revision)
    with work.claimed(), _sharing(pinned, work):
        _mark_crashed(_tag(work))
        progress: Any = create_progress_artifact(0.0, "kvq-progress", f"{pinned.what.model}: preparing")
        for number in range(budget.most_rounds(work.plan)):
            first = prepare(pinned, number)
            if first is None:
                break
            for index in range(first, work.plan.geometry.layers):
                layer(pinned, index, number, progress)
        if pinned.evaluation.evaluate:
            evaluate(pinned, progress)
        done = publish(pinned)
    if any(artifact.failed for artifact in done):
        refused = Refused(done)
        return failed(str(refused), name=GATE_FAILED, data=refused)
    return done


def failed(message: str, **state: Any) -> State:
    """The state in which a run fails for a reason that its log states, too: Prefect logs only what was raised."""
    get_run_logger().error(message)
    return Failed(message=message, **state)


def run(asked: Job, work: Run | None = None) -> tuple[list[Published], dict[str, float]]:
    """Run the flow from this process; its artifacts, published or not, and seconds by stage."""
    work = work or preparation.prepare(asked)
    try:
        done = calibrated(asked, work=work)
    except Refused as refused:
        done = refused.done
    return done, stages.seconds(work)


def calibrated(asked: Job, timeout_seconds: float | None = None, work: Run | None = None) -> list[Published]:
    """Run the flow from this process, or as a part of another flow; its artifacts. Raises Refused where a gate failed.

    timeout_seconds   after which the run fails; its retry goes on where it stopped
    work              of the job, where it is prepared already
    """
    work = work or preparation.prepare(asked)
    parameters = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.settings.items()}
    timed = calibrate if timeout_seconds is None else calibrate.with_options(timeout_seconds=timeout_seconds)
    with nullcontext() if PREFECT_API_URL.value() else own_server(), tags(_tag(work)), _sharing(asked, work):
        try:
            done = timed(parameters)
        except FailedRun:  # the gate's state without what we put into it: the server's, after an answer was lost
            raise Refused(_publish(asked)) from None
    assert not isinstance(done, State), "a failed state is raised"
    return list(done)


@contextmanager
def own_server() -> Iterator[str]:
    """Use the server that this process starts for itself; yields its address."""
    url = flow_server.address()
    with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: flow_server.secret()}):
        yield url


def _tag(work: Run) -> str:
    """Return the tag that flow runs of one run folder share, on any machine."""
    return f"run-{hashlib.sha256(str(work.folder.absolute()).encode()).hexdigest()[:16]}"


def _mark_crashed(tag: str) -> None:
    """Mark flow runs with this tag as crashed that Prefect believes to be running, except the present one: their
    processes died without telling it, by kill -9, a lost machine, a full memory.

    Whoever holds the lock of a run folder knows that no other process works there, since the lock ends with its
    process. A flow run that contained a dead one died with it.
    """
    present = flow_run.get_id()
    wanted = {"tags": {"all_": [tag]}, "state": {"type": {"any_": ["RUNNING"]}}}
    running = FlowRunFilter.model_validate(wanted | ({"id": {"not_any_": [present]}} if present else {}))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=running):
            dead = run
            while dead is not None and dead.state is not None and dead.state.is_running():
                client.set_flow_run_state(dead.id, Crashed(message=DIED), force=True)
                dead = _containing(client, dead)


def _containing(client: SyncPrefectClient, run: FlowRun) -> FlowRun | None:
    """The flow run that a subflow is a part of."""
    task_run = run.parent_task_run_id and client.read_task_run(run.parent_task_run_id)
    return client.read_flow_run(task_run.flow_run_id) if task_run and task_run.flow_run_id else None


class ProgressArtifact:
    """A progress listener that keeps a progress artifact up to date: at the start of each layer, then every 5 s.

    Per cent are of the layers of a round, then of the evaluation.
    """

    def __init__(self, artifact: UUID, model: str):
        self._artifact, self._model = artifact, model
        self._at, self._last = (0, -2), 0.0

    def __call__(self, progress: Progress) -> None:
        now, at = time.monotonic(), (progress.round, progress.layer)
        if at == self._at and now - self._last < EVERY and (progress.layer >= 0 or progress.done < progress.total):
            return
        self._at, self._last = at, now
        share = progress.done / progress.total
        where = progress.stage
        if progress.layer >= 0:
            share = progress.layer / progress.layers
            again = f"round {progress.round}, " if progress.round else ""
            where = f"{again}layer {progress.layer + 1} of {progress.layers}, {progress.stage}"
        update_progress_artifact(self._artifact, 100 * share, f"{self._model}: {where}")

    def finished(self, layer: int, layers: int) -> None:
        """A layer is done."""
        update_progress_artifact(self._artifact, 100 * (layer + 1) / layers, f"{self._model}: {layer + 1} of {layers}")


def _show_results(asked: Job, done: Sequence[Published], folder: Path) -> None:
    """Show the results of a run: the table, the plots if it was evaluated, a link to each version."""
    rows = [row | {"not published": "; ".join(artifact.failed)} for artifact in done for row in artifact.rows()]
    create_table_artifact(rows, key="kvq-artifacts", description=f"Artifacts of {asked.what.model}")
    if (folder / "evaluation.json").exists() and asked.evaluation.evaluate:
        records = [parse(one, TextRecord) for one in json.loads((folder / "evaluation.json").read_text())]
        drawn = {
            "Perplexity by bits": plots.perplexity_by_bits(records),
            "Error by layer": plots.error_by_layer(records),
        }
        images = [
            f"## {name}\n\n![{name}](data:image/png;base64,{base64.b64encode(png).decode()})"
            for name, png in drawn.items()
        ]
        create_markdown_artifact("\n\n".join(images), key="kvq-plots", description=f"Plots of {asked.what.model}")
    for place in (place for artifact in done for place in artifact.places):
        create_link_artifact(_link(place), key="kvq-version", link_text=place.reference)


def _link(place: Place) -> str:
    """Return the address of a version: a page of the Hub, or the file."""
    if place.path is not None:
        return Path(place.path).as_uri()
    from huggingface_hub import constants

    version = reference.parse(place.reference)
    assert isinstance(version, reference.Reference), "what is published on a Hub has a reference"
    repository = f"{reference.kind_and_root(place.registry)[1]}/{version.name}"
    return f"{constants.ENDPOINT}/{repository}/tree/main/versions/{version.value}"
