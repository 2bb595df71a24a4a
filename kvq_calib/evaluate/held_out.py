"""Evaluate on held-out text what a run fitted, before it is published, and again later: has its loss grown (drift)?

The text of a run is chosen, and kept, before the first layer, so that too little of it stops a run at its beginning.
Finished units of the evaluation are kept in the run folder: a run that was stopped repeats none of them.
A drift check is on new text, the held-out part of a corpus: even of the corpus of the fit nothing was fitted on it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from kvq_calib.evaluate import record
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.record import Protocol
from kvq_calib.evaluate.subject import Subject, find
from kvq_calib.model import find as models
from kvq_calib.run.plan import Plan
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_calib.text.corpus import Batch
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import rating, reference
from kvq_runtime.registry import resolve as registry
from kvq_runtime.registry.evaluation_records import TextRecord, parse
from kvq_runtime.registry.rating import Bounds
from kvq_runtime.registry.reference import PRODUCTION, Reference, order
from kvq_runtime.registry.registry import Registry

SHARE = 32  # of the tokens of the fit one in so many is measured on,
TOKENS = 32768  # and no more than these
PROTOCOL = Protocol(error_windows=2)


def windows(plan: Plan, length: int) -> int:
    """Return the default number of windows: a small part of the run, and two for a standard error."""
    return max(2, min(plan.tokens // SHARE, TOKENS) // length)


def choose(run: Run, count: int | None = None) -> Batch:
    """Choose the windows to measure on, as long as the fit's sequences; reread them if the run folder has them.

    count   raises ValueError for fewer windows; None: `windows(...)`, or all
    """
    plan, files, ledger = run.plan, run.files, Ledger(run.folder / "evaluated")
    length = min(plan.seq_len, files.context)
    at_most = count or windows(plan, length)

    def select() -> dict[str, Any]:
        try:
            given = (plan.corpus, files.path, at_most, length, plan.seed)
            return corpus.select_at_most(*given, least=count or 1).to_json()
        except corpus.TooLittle as error:
            raise ValueError(f"{error}; --no-eval leaves the evaluation out") from None

    return Batch.from_json(ledger.kept(select, text=[plan.corpus, files.id, count, at_most, length, plan.seed]))


def subjects(fitted: Mapping[str, Artifact]) -> list[Subject]:
    """The artifacts as fitted, before anything is published, by the recipe's name."""
    return [
        Subject.of(made, hashlib.sha256(artifact.to_bytes(made)).hexdigest(), name, published=False)
        for name, made in fitted.items()
    ]


def evaluate(
    run: Run,
    fitted: Mapping[str, Artifact],
    beside: Sequence[Subject] = (),
    count: int | None = None,
    protocol: Protocol = PROTOCOL,
) -> list[dict[str, Any]]:
    """Return a record per artifact, then one per subject `beside` them, on `count` windows.

    Loads the whole model, in the precision of `kvq eval`: float32 on a CPU, else as stored.
    """
    batch, measured = choose(run, count), [*subjects(fitted), *beside]
    total, done = record.work(run.files, batch, len(measured), protocol), 0

    def progressed(tokens: int) -> None:
        nonlocal done
        done += tokens
        run.report(-1, "evaluation", done, total, tokens)

    torch.use_deterministic_algorithms(False)  # of a fit; what a cache does has no such version for every operation
    ledger = Ledger(run.folder / "evaluated")
    return record.evaluate(run.files, batch, measured, protocol, run.plan.device, progress=progressed, ledger=ledger)


@dataclass(frozen=True)
class DriftResult:
    """One version, measured again.

    perplexity   over that of the 16-bit model, under the protocol that the bounds judge; None: nothing was encoded
    protocol     that one, "full" or "in-use"
    failed       the bounds that it does not keep
    promoted     the alias that points to it since then; "" if none was moved
    """

    artifact: str
    perplexity: float | None
    kl: float | None
    failed: Sequence[str] = ()
    promoted: str = ""
    protocol: str | None = None


def week(today: date) -> int:
    """A seed for the choice of text that is another one every week: 202614 in week 14 of 2026."""
    year, number, _ = today.isocalendar()
    return 100 * year + number


def check_drift(
    names: Sequence[str],
    model: str,
    source: str,
    bounds: Bounds,
    seed: int,
    windows: int = 16,
    length: int | None = None,
    alias: str = PRODUCTION,
    promote: bool = False,
    device: str = "cpu",
    registry_url: str | None = None,
) -> list[DriftResult]:
    """Measure the version that `alias` points to of each name, and keep the record in the registry.

    promote   measure the newest version as well, and point the alias to it if it keeps the bounds

    Raises ValueError for bounds that are none, NotFound for a name without versions, or whose versions are all yanked.
    """
    if not bounds.given:
        raise ValueError("a drift check needs a bound: max_perplexity_ratio, max_kl, or both")
    wanted = [one for name in names for one in _versions(name, alias, promote, registry_url)]
    files = models.resolve(model)  # which may be a long download
    subjects = [find(one, files, registry_url) for one in wanted]
    tokens = corpus.select(
        source, files.path, windows, length or min(files.entry.seq_len, files.context), seed, "held-out"
    )
    found = record.evaluate(files, tokens, subjects, PROTOCOL, device)
    checked = []
    for subject, measured in zip(subjects, found, strict=True):
        judged = rating.with_gate(measured, bounds)
        place, version = _place(subject.name, registry_url)
        place.add_evaluation(judged, version.name)
        told = parse(judged, TextRecord)
        failed, (protocol, found) = rating.failed_bounds(told, bounds), told.decisive or (None, None)
        costs = (1 + found.relative, found.kl) if found else (None, None)
        promoted = _promote(place, version, alias) if promote and not failed else ""
        checked.append(DriftResult(subject.name, *costs, failed, promoted, protocol))
    return checked


def _versions(name: str, alias: str, newest: bool, registry_url: str | None) -> list[str]:
    """References, by number: what the alias points to, and the newest version if that is asked for, or all there is."""
    place, given = _place(name, registry_url)
    state = place.existing(given.name)
    chosen = {state.at(alias)} if given.by == "default" else {registry.choose(state, given)[0].version}
    latest = state.newest()
    if latest is not None and (newest or chosen == {None}):
        chosen.add(latest.version)
    if chosen == {None}:
        raise NotFound(f"every version of {given.name} is yanked, and no alias {alias} points to one; leave it out")
    prefix = f"{given.registry}/{given.name}" if given.registry else given.name
    return [f"{prefix}@{version}" for version in sorted((one for one in chosen if one), key=order)]


def _place(given: str, registry_url: str | None) -> tuple[Registry, Reference]:
    found = reference.parse(given)
    if not isinstance(found, Reference):
        raise ValueError(f"{given} is a file; a drift check is of what a registry holds")
    return registry.open_registry(found.registry or registry_url), found


def _promote(place: Registry, version: Reference, alias: str) -> str:
    """Point the alias to a version, if that is the newest and the alias is elsewhere; returns the alias, or ""."""
    state = place.existing(version.name)
    latest, before = state.newest(), state.at(alias)
    if latest is None or version.value != latest.version or before == version.value:
        return ""
    place.promote(version.name, version.value, alias, expect=before or "none", force=True)  # bounds judged it
    return alias
