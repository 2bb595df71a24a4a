"""Measure what was published again, on new text: has its loss grown beyond the bound?

The text is the held-out part of a corpus: even where the corpus is the one of the fit, none of it was fitted on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from kvq_calib.evaluate import gate, record
from kvq_calib.evaluate.gate import Bounds
from kvq_calib.evaluate.held_out import PROTOCOL
from kvq_calib.evaluate.subject import find
from kvq_calib.model import find as models
from kvq_calib.text import corpus
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import reference
from kvq_runtime.registry import resolve as registry
from kvq_runtime.registry.measured import TextRecord
from kvq_runtime.registry.reference import PRODUCTION, Reference, order
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.sound import read


@dataclass(frozen=True)
class DriftResult:
    """One version, measured again.

    perplexity   over that of the 16-bit model, under the protocol that the bounds judge; None: nothing was encoded
    protocol     that one, "full" or "in-use"
    failed       the bounds that it does not keep
    promoted     the alias that points to it since then; "" if none was moved
    proposed     the alias, if that is protected, for which it waits for approvals; "" if none
    """

    artifact: str
    perplexity: float | None
    kl: float | None
    failed: Sequence[str] = ()
    promoted: str = ""
    protocol: str | None = None
    proposed: str = ""


def week(today: date) -> int:
    """A seed for the choice of text that is another one every week: 202614 in week 14 of 2026."""
    year, number, _ = today.isocalendar()
    return 100 * year + number


def check(
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
    files = models.resolve(model)
    wanted = [one for name in names for one in _versions(name, alias, promote, registry_url)]
    subjects = [find(one, files, registry_url) for one in wanted]
    tokens = corpus.select(
        source, files.path, windows, length or min(files.entry.seq_len, files.context), seed, "held-out"
    )
    found = record.evaluate(files, tokens, subjects, PROTOCOL, device)
    checked = []
    for subject, measured in zip(subjects, found, strict=True):
        judged = gate.judged(measured, bounds)
        place, version = _place(subject.name, registry_url)
        place.add_evaluation(judged, version.name)
        told = read(judged, TextRecord)
        failed, (protocol, found) = gate.passes(told, bounds), told.decisive or (None, None)
        costs = (1 + found.relative, found.kl) if found else (None, None)
        promoted, proposed = _promote(place, version, alias) if promote and not failed else ("", "")
        checked.append(DriftResult(subject.name, *costs, failed, promoted, protocol, proposed))
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


def _promote(place: Registry, version: Reference, alias: str) -> tuple[str, str]:
    """Point the alias to a version, if that is the newest and the alias is elsewhere; returns the alias as what was
    moved, or as what that was proposed for."""
    state = place.existing(version.name)
    latest, before = state.newest(), state.at(alias)
    if latest is None or version.value != latest.version or before == version.value:
        return "", ""
    after = place.promote(version.name, version.value, alias, expect=before or "none", force=True)  # bounds judged it
    return (alias, "") if after.at(alias) == version.value else ("", alias)
