"""Run a job: calibrate, evaluate, publish."""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvq_calib.evaluate import held_out
from kvq_calib.evaluate.subject import Subject, find
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.report import card as report
from kvq_calib.report import plots, sections, tables
from kvq_calib.report.published import Place, Published
from kvq_calib.run import calibrate, checkpoint
from kvq_calib.run.run import Executor, Listener, Run, silent
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.disk import files as disk
from kvq_runtime.registry import card, rating
from kvq_runtime.registry.evaluation_records import TextRecord, parse
from kvq_runtime.registry.hub.client import publishing
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.memory import asymptotic_bits

_log = logging.getLogger(__name__)


def run(job: Job, listener: Listener = silent) -> tuple[list[Published], dict[str, float]]:
    """Calibrate, evaluate, publish. Returns the artifacts, and seconds by stage."""
    return complete(job, prepare(job, listener))


def complete(job: Job, work: Run) -> tuple[list[Published], dict[str, float]]:
    """`run` of a job that is prepared already."""
    with work.claimed():
        begin(job, work)
        with executor(job, work) as execute:
            fitted = calibrate.fit(replace(work, executor=execute))
        begun = time.perf_counter()
        records = evaluate(job, work, fitted)
        spent = {"evaluation": time.perf_counter() - begun} if records else {}
        return publish(job, work, fitted, records), calibrate.seconds(work) | spent


def fit(work: Run) -> list[Subject]:
    """Fit the recipes in the run folder, and publish nothing; Conflict if another process does just that."""
    return held_out.subjects(calibrate.calibrate(work))


def executor(job: Job, work: Run) -> AbstractContextManager[Executor]:
    """Who executes the chunks: this process, or workers for as long as this is entered."""
    if job.machine.workers is None:
        return nullcontext(work.executor)
    from kvq_calib.run import workers  # which imports ray

    return workers.ray_executor(work, job.machine.workers)


def begin(job: Job, work: Run) -> None:
    """Open the run, and choose its texts: what is missing is found before the work."""
    for recipe in work.plan.recipes:
        checkpoint.check_beside(job.artifact_name(work.files, recipe.name))
    calibrate.start(work)
    if job.evaluation.evaluate:
        held_out.choose(work, job.beside(work.files), job.evaluation.eval_windows)


def evaluate(job: Job, work: Run, fitted: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Measure what was fitted, and write evaluation.json in the run folder: artifacts, then baselines."""
    asked = job.evaluation
    if not asked.evaluate:
        return []
    beside = [find(given, work.files, job.publication.registry) for given in asked.baselines]
    records = held_out.evaluate(work, fitted, beside, asked.eval_windows, also=job.beside(work.files))
    records = [rating.with_gate(one, asked.bounds) for one in records[: len(fitted)]] + records[len(fitted) :]
    text = json.dumps(records, indent=1) + "\n"
    disk.save(work.folder / "evaluation.json", text.encode())
    return records


@publishing()
def publish(
    job: Job, work: Run, fitted: Mapping[str, Artifact], records: Sequence[Mapping[str, Any]] = ()
) -> list[Published]:
    """Publish artifacts that keep the bounds, with their records, cards and plots; leave others in the run folder."""
    targets, license = job.publication.targets, sections.license_of(work.files.path)
    drawn, named, done = {}, [], []
    if records:
        told = [parse(one, TextRecord) for one in records]
        named = tables.named(told, [*fitted, *job.evaluation.baselines])
        drawn = {"error-by-layer.png": plots.error_by_layer(named)}
        drawn["perplexity-by-bits.png"] = plots.perplexity_by_bits(named)
    for number, (recipe, made) in enumerate(fitted.items()):
        name, data = job.artifact_name(work.files, recipe), artifact.to_bytes(made)
        own = records[number] if records else None
        failed = rating.failed_bounds(named[number], job.evaluation.bounds) if own else []
        shown = [named[number], *named[:number], *named[number + 1 :]] if own else []
        layers = tables.by_layer(made) if "budget" in made.fit else []
        beside, folder = report.files(made, shown, name, drawn, license), work.folder / name
        chosen = [] if failed else targets
        places = tuple(_publish(target, name, data, job.publication.version, beside, own) for target in chosen)
        _leave(folder, ({} if places else {ARTIFACT_FILE: data}) | beside, own)
        measures = made.fit["layers"]
        errors = [sum(layer[role]["relative_error"] for layer in measures) / len(measures) for role in ("key", "value")]
        bits = asymptotic_bits(made.recipe, made.fingerprint.geometry)
        measured = named[number] if own else None
        sha256 = hashlib.sha256(data).hexdigest()
        costs = (bits, errors[0], errors[1], measured)
        done.append(Published(recipe, name, sha256, *costs, failed, layers, places, str(folder)))
    return done


def _publish(
    target: Registry,
    name: str,
    data: bytes,
    number: str | None,
    beside: Mapping[str, bytes],
    own: Mapping[str, Any] | None,
) -> Place:
    """Publish to one registry, with a snippet that loads from there."""
    text = card.addressed(beside["README.md"].decode(), target.url, name)
    known = target.current_state(name).with_digest(hashlib.sha256(data).hexdigest())
    version = target.publish(name, data, number, {**beside, "README.md": text.encode()})
    if own:
        target.add_evaluation(own, name)
    local = target.url.startswith("file:")
    reference = f"{name if local else f'{target.url}/{name}'}@{version.version}"
    path = str(target.fetch(name, version)) if local else None
    return Place(target.url, reference, path, known is None, version.yanked)


def _leave(folder: Path, contents: Mapping[str, bytes], own: Mapping[str, Any] | None) -> None:
    """Put an artifact's card, plots and record where its run is, in the shape that `kvq pull` gives."""
    disk.make_folder(folder)
    record = {"evaluation.json": (json.dumps(own, indent=1) + "\n").encode()} if own else {}
    for name, content in {**contents, **record}.items():
        disk.save(folder / name, content)
