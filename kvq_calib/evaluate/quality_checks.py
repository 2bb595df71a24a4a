"""Evaluate artifacts on held-out text before publication, and again later (drift).

The text of a run is chosen, and saved, before the first layer, so that too little of it stops a run at its beginning.
The run folder keeps finished units of the evaluation: a resumed run repeats none of them. A drift check uses new text,
from the held-out part of a corpus.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, ClassVar

import torch

from kvq_calib.evaluate import perplexity, record
from kvq_calib.evaluate.candidate import Candidate, find
from kvq_calib.evaluate.saved_results import SavedResults
from kvq_calib.model import catalog
from kvq_calib.model import find as models
from kvq_calib.run.device import usable
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_calib.text.corpus import Batch
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import rating, reference, resolve
from kvq_runtime.registry.evaluation_records import parse
from kvq_runtime.registry.rating import Bounds
from kvq_runtime.registry.reference import PRODUCTION, Reference
from kvq_runtime.registry.registry import Registry

TOKENS = 32768  # to measure on, at most


def windows(length: int) -> int:
    """Return the default number of windows, at most: fewer are measured if they are precise enough."""
    return max(perplexity.LEAST, TOKENS // length)


def choose(run: Run, count: int | None = None) -> Batch:
    """Choose the windows to measure on, as long as the fit's sequences; reread them if the run folder has them.

    count   raises ValueError for fewer windows; None: `windows(...)`, or all
    """
    plan, files, saved = run.plan, run.files, SavedResults(run.folder / "evaluated")
    length = min(plan.seq_len, files.context)
    at_most = count or windows(length)

    def select() -> dict[str, Any]:
        try:
            given = (plan.corpus, files.path, at_most, length, plan.seed)
            return corpus.select_at_most(*given, least=count or 1).to_json()
        except corpus.TooLittle as error:
            raise ValueError(f"{error}; --no-eval leaves the evaluation out") from None

    return Batch.from_json(saved.kept(select, text=[plan.corpus, files.id, count, at_most, length, plan.seed]))


def candidates(fitted: Mapping[str, Artifact]) -> list[Candidate]:
    """Make candidates of fitted artifacts before publication, named by their recipes."""
    return [
        Candidate.of(made, hashlib.sha256(artifact.to_bytes(made)).hexdigest(), name, published=False)
        for name, made in fitted.items()
    ]


def evaluate(
    run: Run,
    fitted: Mapping[str, Artifact],
    beside: Sequence[Candidate] = (),
    count: int | None = None,
) -> list[dict[str, Any]]:
    """Return a record per artifact, then one per candidate `beside` them, on `count` windows.

    Loads the whole model, in the precision of `kvq eval`: float32 on a CPU, else as stored.

    count   None: as many as are precise enough, `windows(...)` at most
    """
    batch, measured, protocol = choose(run, count), [*candidates(fitted), *beside], record.Protocol(precise=not count)
    total, done = record.work(batch, measured, protocol), 0

    def progressed(tokens: int) -> None:
        nonlocal done
        done += tokens
        run.report(-1, "evaluation", done, total)

    torch.use_deterministic_algorithms(False)  # of a fit; what a cache does has no such version for every operation
    saved = SavedResults(run.folder / "evaluated")
    return record.evaluate(run.files, batch, measured, protocol, run.plan.device, progress=progressed, saved=saved)


@dataclass(frozen=True)
class DriftCheck:
    """The settings of a drift check, which JSON can hold.

    model       a catalog name, a folder or a Hub id
    artifacts   names in the registry, all of this model
    corpus      whose held-out part is measured: `windows` of `length` tokens; None: the model's
    seed        of the choice of text; None: another one every week
    alias       whose version is measured; the newest version if it points to none
    registry    file:///folder or hf://org; None: $KVQ_REGISTRY, else $KVQ_HOME/registry
    max_...     bounds on a full encode: perplexity over that of 16 bit, nats per token, share of blocks with errors
                beyond the calibration's
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # where a flow checks settings
    model: str
    artifacts: Sequence[str]
    corpus: str = "demo"
    windows: int = 16
    length: int | None = None
    seed: int | None = None
    alias: str = PRODUCTION
    device: str = "cpu"
    registry: str | None = None
    max_perplexity_ratio: float | None = 1.05
    max_kl: float | None = None
    max_beyond: float | None = None

    @property
    def bounds(self) -> Bounds:
        """Return the bounds; ValueError without one."""
        bounds = Bounds(self.max_perplexity_ratio, self.max_kl, self.max_beyond)
        if not bounds.given:
            raise ValueError("a drift check needs a bound: max_perplexity_ratio, max_kl, or both")
        return bounds

    def check(self) -> None:
        """Check the names in the settings, as far as this takes no download; raise ValueError or RuntimeError."""
        catalog.check(self.model)
        corpus.check(self.corpus)
        usable(self.device)
        for name in self.artifacts:
            _open(name, self.registry)
        _ = self.bounds  # which raises for invalid ones


@dataclass(frozen=True)
class DriftResult:
    """One version, measured again.

    protocol     the protocol that the bounds judge, "full" or "in-use"; None: nothing was encoded
    perplexity   over the 16-bit model's, under it
    failed       a sentence for each exceeded bound
    """

    artifact: str
    perplexity: float | None
    kl: float | None
    protocol: str | None = None
    failed: Sequence[str] = ()


def week(today: date) -> int:
    """Return a seed that changes every week: 202614 in week 14 of 2026."""
    year, number, _ = today.isocalendar()
    return 100 * year + number


def check_drift(check: DriftCheck) -> list[DriftResult]:
    """Measure the version of each name that the alias points to, else the newest; add the records to the registry.

    Raises ValueError without bounds, NotFound for a name without versions, or with yanked ones alone.
    """
    bounds, seed = check.bounds, week(datetime.now(UTC).date()) if check.seed is None else check.seed
    references = [_version(name, check.alias, check.registry) for name in check.artifacts]
    files = models.resolve(check.model)  # which may be a long download
    candidates = [find(reference, files, check.registry) for reference in references]
    length = check.length or min(files.entry.seq_len, files.context)
    batch = corpus.select(check.corpus, files.path, check.windows, length, seed, "held-out")
    measurements = record.evaluate(files, batch, candidates, device=check.device)
    results = []
    for candidate, measured in zip(candidates, measurements, strict=True):
        judged = rating.with_gate(measured, bounds)
        registry, version = _open(candidate.name, check.registry)
        registry.add_evaluation(judged, version.name)
        parsed = parse(judged)
        protocol, figures = parsed.decisive or (None, None)
        costs = (1 + figures.relative, figures.kl) if figures else (None, None)
        results.append(DriftResult(candidate.name, *costs, protocol, rating.failed_bounds(parsed, bounds)))
    return results


def _version(name: str, alias: str, registry_url: str | None) -> str:
    """Return the reference of one version: of the alias, else the newest, unless `name` says which."""
    registry, given = _open(name, registry_url)
    state = registry.existing(given.name)
    newest = state.newest()
    version = state.at(alias) or (newest and newest.version)
    if given.by != "default":
        version = resolve.choose(state, given)[0].version
    if version is None:
        raise NotFound(f"every version of {given.name} is yanked, and no alias {alias} points to one; leave it out")
    return f"{given.registry}/{given.name}@{version}" if given.registry else f"{given.name}@{version}"


def _open(name: str, registry_url: str | None) -> tuple[Registry, Reference]:
    """Open the registry of a reference."""
    parsed = reference.parse(name)
    if not isinstance(parsed, Reference):
        raise ValueError(f"{name} is a file; a drift check is of a registry's versions")
    return resolve.open_registry(parsed.registry or registry_url), parsed
