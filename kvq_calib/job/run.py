"""Run a job: calibrate, evaluate, publish; describe its artifacts: measurements, registries, files."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvq_calib.evaluate import quality_checks
from kvq_calib.evaluate.candidate import Candidate, find
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.report import card as cards
from kvq_calib.report import plots, tables
from kvq_calib.run import calibrate
from kvq_calib.run.run import Executor, Listener, Run, silent
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.disk import files as disk
from kvq_runtime.registry import rating
from kvq_runtime.registry.copy import addressed
from kvq_runtime.registry.evaluation_records import SPOKEN, TextRecord, parse
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.memory import asymptotic_bits

PICTURE = "perplexity-by-bits.png"  # beside a card


@dataclass(frozen=True)
class PublishedAt:
    """A registry that has an artifact now.

    reference   what loads it there: name@1.2.0, or hf://org/name@1.2.0
    path        of its file; None on a Hub
    new         whether this run published it; False: the same bytes were there, and nothing changed
    yanked      the reason if that version is withdrawn
    """

    registry: str
    reference: str
    path: str | None
    new: bool
    yanked: str | None = None


@dataclass(frozen=True)
class Published:
    """One artifact as fitted and measured, and published if it keeps the bounds.

    key_error, value_error   mean over layers of ‖x - x̂‖² / ‖x - mean‖², on held-out sequences
    measured     the evaluation record; None: not asked for
    failed       the bounds that it does not keep
    layers       the settings chosen by layer, for a recipe with a budget
    places       the registries that have it
    folder       of card, plots and record, and of the artifact if it was not published
    """

    recipe: str
    name: str
    sha256: str
    bits: float
    key_error: float
    value_error: float
    measured: TextRecord | None = None
    failed: Sequence[str] = ()
    layers: list[dict] = field(default_factory=list)
    places: tuple[PublishedAt, ...] = ()
    folder: str = ""

    @property
    def reference(self) -> str:
        """The reference that loads it from the first of its registries; its name if none has it."""
        return self.places[0].reference if self.places else self.name

    def row(self) -> dict[str, Any]:
        """Return its line of the result table."""
        row: dict[str, Any] = {"recipe": self.recipe, "artifact": self.reference, "sha256": self.sha256[:12]}
        row |= {"bits": round(self.bits, 4), "key error": round(self.key_error, 5)}
        return row | {"value error": round(self.value_error, 5)}

    def record(self) -> dict[str, Any]:
        """Return all of it as JSON: plain numbers, whose units are in their names."""
        made = {
            "recipe": self.recipe,
            "artifact": self.reference,
            "sha256": self.sha256,
            "bits_per_element": self.bits,
            "key_error": self.key_error,
            "value_error": self.value_error,
            **_numbers(self.measured),
            "published": [asdict(place) for place in self.places],
            "folder": self.folder,
            "exceeds": list(self.failed),
        }
        return made | ({"layers": self.layers} if self.layers else {})


def baseline_record(record: TextRecord) -> dict[str, Any]:
    """Return a baseline as JSON, with the names of `Published.record`."""
    row = {"recipe": record.result.recipe, "artifact": record.artifact}
    return row | {"bits_per_element": record.result.bits["asymptotic"]} | _numbers(record)


def _numbers(record: TextRecord | None) -> dict[str, Any]:
    """Return figures by names with their units, or the reason for missing figures."""
    if record is None:
        return {}
    if record.decisive is None:
        return {"unmeasured": "; ".join(record.reasons())}
    protocol, figures = record.decisive
    numbers = {"protocol": SPOKEN[protocol], "perplexity": figures.perplexity}
    numbers |= {"perplexity_over_16_bit": 1 + figures.relative, "kl_nats_per_token": figures.kl}
    return numbers | ({} if figures.beyond is None else {"blocks_beyond": figures.beyond})


def run(job: Job, listener: Listener = silent) -> tuple[list[Published], dict[str, float]]:
    """Calibrate, evaluate, publish; return the artifacts, and seconds by stage."""
    return complete(job, prepare(job, listener))


def complete(job: Job, work: Run) -> tuple[list[Published], dict[str, float]]:
    """Run a job that is prepared already."""
    with work.claimed():
        begin(job, work)
        with executor(job, work) as execute:
            fitted = calibrate.fit(replace(work, executor=execute))
        begun = time.perf_counter()
        records = evaluate(job, work, fitted)
        spent = {"evaluation": time.perf_counter() - begun} if records else {}
        return publish(job, work, fitted, records), calibrate.seconds(work) | spent


def fit(work: Run) -> list[Candidate]:
    """Fit the recipes in the run folder without publishing; raise Conflict if another process does the same."""
    return quality_checks.candidates(calibrate.calibrate(work))


def executor(job: Job, work: Run) -> AbstractContextManager[Executor]:
    """Return the executor of chunks: this process, or workers as long as the context is entered."""
    if job.workers is None:
        return nullcontext(work.executor)
    from kvq_calib.run import workers  # which imports ray

    return workers.ray_executor(work, job.workers)


def begin(job: Job, work: Run) -> None:
    """Open the run, and choose its texts, so that missing text is found before the work."""
    calibrate.start(work)
    if job.evaluate:
        quality_checks.choose(work, job.eval_windows)


def evaluate(job: Job, work: Run, fitted: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Measure the fits, and write evaluation.json in the run folder: artifacts, then baselines."""
    if not job.evaluate:
        return []
    baselines = [find(text, work.files, job.registry) for text in job.baselines]
    records = quality_checks.evaluate(work, fitted, baselines, job.eval_windows)
    records = [rating.with_gate(one, job.bounds) for one in records[: len(fitted)]] + records[len(fitted) :]
    disk.save(work.folder / "evaluation.json", (json.dumps(records, indent=1) + "\n").encode())
    return records


def publish(
    job: Job, work: Run, fitted: Mapping[str, Artifact], records: Sequence[Mapping[str, Any]] = ()
) -> list[Published]:
    """Publish artifacts that keep the bounds, with their records, cards and plots; leave others in the run folder."""
    targets, license = job.targets, cards.license_of(work.files.path)
    pictures, named, done = {}, [], []
    if records:
        parsed = [parse(one) for one in records]
        named = tables.named(parsed, [*fitted, *job.baselines])
        pictures = {PICTURE: plots.png(plots.cost_by_bits(named))}
    for number, (recipe, made) in enumerate(fitted.items()):
        name, data = job.artifact_name(work.files, recipe), artifact.to_bytes(made)
        folder = work.folder / "artifacts" / name
        record = records[number] if records else None
        failed = rating.failed_bounds(named[number], job.bounds) if records else []
        shown = [named[number], *named[:number], *named[number + 1 :]] if records else []
        beside = {"README.md": cards.card(made, shown, name, license, PICTURE if records else None).encode()} | pictures
        version = job.version
        places = () if failed else tuple(_publish(target, name, data, version, beside, record) for target in targets)
        left = beside if places else {ARTIFACT_FILE: data} | beside
        left |= {"evaluation.json": (json.dumps(record, indent=1) + "\n").encode()} if record else {}
        disk.make_folder(folder)
        for file, content in left.items():  # in the shape that `kvq pull` gives
            disk.save(folder / file, content)
        layers = made.fit["layers"]
        key, value = (sum(one[role]["relative_error"] for one in layers) / len(layers) for role in ("key", "value"))
        bits = asymptotic_bits(made.recipe, made.fingerprint.geometry)
        measured, by_layer = named[number] if records else None, tables.by_layer(made) if "budget" in made.fit else []
        sha256 = hashlib.sha256(data).hexdigest()
        costs = (bits, key, value, measured)
        done.append(Published(recipe, name, sha256, *costs, failed, by_layer, places, str(folder)))
    return done


def _publish(
    target: Registry,
    name: str,
    data: bytes,
    number: str | None,
    beside: Mapping[str, bytes],
    record: Mapping[str, Any] | None,
) -> PublishedAt:
    """Publish to one registry, with a snippet in the card that loads from there."""
    text = addressed(beside["README.md"].decode(), target.url, name)
    known = target.state(name).with_digest(hashlib.sha256(data).hexdigest())
    version = target.publish(name, data, number, {**beside, "README.md": text.encode()})
    if record:
        target.add_evaluation(record, name)
    local = target.url.startswith("file:")
    reference = f"{name if local else f'{target.url}/{name}'}@{version.version}"
    path = str(target.fetch(name, version)) if local else None
    return PublishedAt(target.url, reference, path, known is None, version.yanked)
