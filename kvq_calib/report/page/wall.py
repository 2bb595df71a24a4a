"""Gather what is known of every version of a registry, and write its page: what a team puts on a wall.

    registry → of_registry → page

No file is loaded as a whole, so that 500 models take seconds: a row a version is read from events, headers and records.
What cannot be read is a row with the reason. The first half is what `kvq report --registry --json` prints.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from kvq_calib.report.page import evidence, html
from kvq_calib.report.page.known import aliases, named
from kvq_calib.report.panels import Point
from kvq_runtime import __version__
from kvq_runtime.errors import ArtifactError, NotFound, counted
from kvq_runtime.registry import verdict
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.measured import FULL
from kvq_runtime.registry.reference import PRODUCTION, order
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.sound import sound
from kvq_runtime.registry.verdict import COLOURS, LOSSY
from kvq_runtime.store.memory import human

Row = Mapping[str, Any]
WORST = 6  # points of the picture that are named
DRIFTED = 1.1  # times the divergence that was measured at publication, from which a version has drifted
UNREADABLE = (ArtifactError, NotFound, PermissionError)


def of_registry(registry: Registry, now: datetime) -> dict[str, Any]:
    """Every name and version: `versions` by name, the newest first; `faults` of names that cannot be read."""
    versions, faults = [], []
    for name in registry.names():
        try:
            versions += list(_versions(registry, registry.state(name), now))
        except UNREADABLE as error:
            faults.append({"name": name, "reason": str(error)})
    made = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"kvq": __version__, "registry": registry.url, "made": made, "versions": versions, "faults": faults}


def _versions(registry: Registry, state: State, now: datetime) -> Iterator[dict[str, Any]]:
    """Rows of a name; `losses` of each are those of all versions up to it, in their order."""
    newest, production = state.newest(), state.at(PRODUCTION)
    rows: list[dict[str, Any]] = []
    for version in sorted(state.versions.values(), key=lambda one: order(one.version)):
        row: dict[str, Any] = {"name": state.name, "version": version.version, "published": version.at}
        row["days"] = max(0, (now - datetime.fromisoformat(version.at)).days)
        row |= {"size": version.size, "sha256": version.sha256, "yanked": version.yanked}
        row |= {"production": version.version == production, "newest": newest is not None and version == newest}
        row |= {"aliases": aliases(state, version)}
        row |= _about(registry, state.name, version)
        row |= _loss(registry, state.name, version, row["corpus"], row.pop("corpus_digest"))
        row["losses"] = [one["kl"] for one in rows] + [row["kl"]]
        rows.append(row | {"needs": _needs(row)})
    yield from reversed(rows)


def _about(registry: Registry, name: str, version: Version) -> dict[str, Any]:
    try:
        about = registry.about(name, version)
        return {field: about[field] for field in ("recipe", "model", "corpus", "corpus_digest")} | {"damage": None}
    except UNREADABLE as error:
        return dict.fromkeys(("recipe", "model", "corpus", "corpus_digest")) | {"damage": str(error)}


def _loss(registry: Registry, name: str, version: Version, fitted: str | None, digest: str | None) -> dict[str, Any]:
    """Bits, the loss that counts, the last verdict on bounds, and the loss of the last weekly check."""
    found: dict[str, Any] = dict.fromkeys(("bits", "kl", "relative", "protocol", "parameters", "week", "drift", "why"))
    found["verdict"] = verdict.NOT_MEASURED
    try:
        records = sound(registry.evaluations(version.sha256, name))
    except UNREADABLE as error:
        return found | {"failed": [], "damage": str(error)}
    main = verdict.main(records, fitted, digest)
    verdicts, judged = evidence.gate(records), verdict.of_record(main)
    found["failed"] = verdicts[-1]["failed"] if verdicts else []
    found |= {"verdict": judged.word, "why": judged.why}
    if main is None:
        return found
    row = evidence.deciding(evidence.losses(main))
    found |= {"bits": main.result.bits.get("asymptotic"), "parameters": main.protocol.model.parameters}
    found |= {name: row[name] for name in ("kl", "relative", "protocol")} if row else {}
    weeks = evidence.weekly(records)
    if weeks and weeks[-1]["kl"] is not None and evidence.week(main) is None and found["kl"]:
        found |= {"week": weeks[-1]["week"], "drift": weeks[-1]["kl"] / found["kl"]}
    return found


def _needs(row: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a version needs attention."""
    said = []
    if row["damage"] is not None:
        said.append(f"cannot be read: {row['damage']}")
    if row["failed"]:
        said.append("exceeds its bounds: " + "; ".join(row["failed"]))
    elif row["verdict"] == verdict.LOSSY:
        said.append(f"{row['verdict']}: {row['why']}")
    if row["drift"] is not None and row["drift"] > DRIFTED:
        said.append(f"drifted: {row['drift']:.2f} times the divergence at publication")
    if row["kl"] is None and row["damage"] is None and (row["newest"] or row["production"]):
        said.append("not measured: kvq eval")
    return said


def page(whole: Mapping[str, Any]) -> str:
    """The whole page."""
    rows, now = whole["versions"], current(whole["versions"])
    counts, chosen = Counter(row["verdict"] for row in now), {id(row) for row in now}
    points = [
        Point(row["recipe"], named(row), row["bits"], row["kl"])
        for row in now
        if row["kl"] and row["bits"] is not None and row["protocol"] == FULL and row["recipe"]
    ]
    needs = [{"name": one["name"], "what": f"cannot be read: {one['reason']}"} for one in whole["faults"]]
    needs += [{"name": named(row), "what": "; ".join(row["needs"])} for row in now if row["needs"]]
    return html.page(
        "wall.html",
        whole=whole,
        heading=f"Registry: {counted(len({row['name'] for row in rows}), 'name')}, {counted(len(rows), 'version')}",
        verdicts={word: counts[word] for word in COLOURS if counts[word]},
        figures=_figures(rows, now, len(needs)),
        needs=needs,
        picture=html.outliers(points, WORST) if len(points) > 1 else None,
        worst=min(WORST, len({(one.bits, one.cost) for one in points})),
        versions=[(row, _classes(row, id(row) in chosen), _marks(row), *_spark(row["losses"])) for row in rows],
    )


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the version that each name alone means: production, else the newest that is not yanked."""
    chosen: dict[str, Row] = {}
    for row in rows:
        if row["production"] or (row["newest"] and row["name"] not in chosen):
            chosen[row["name"]] = row
    return list(chosen.values())


def _figures(rows: Sequence[Row], now: Sequence[Row], needs: int) -> list[tuple[Any, str]]:
    """The tiles: a figure, and what it is."""
    return [
        (len({row["name"] for row in rows}), "names"),
        (len({row["model"] for row in rows if row["model"]}), "models"),
        (len(rows), "versions"),
        (sum(row["production"] for row in rows), "in production"),
        (sum(row["production"] and not row["newest"] for row in rows), "production behind the newest"),
        (f"{sum(row['kl'] is not None for row in now)} of {len(now)}", "measured, of those in use"),
        (sum(bool(row["failed"] or row["verdict"] == LOSSY) for row in now), "too lossy, or beyond bounds"),
        (needs, "to look at"),
        (human(sum(row["size"] for row in rows)), "all files"),
    ]


def _classes(row: Row, chosen: bool) -> str:
    """The words that the page's filter looks for."""
    found = {"production": row["production"], "newest": row["newest"], "current": chosen}
    found |= {"yanked": row["yanked"] is not None, "attention": row["needs"]}
    return " ".join(mark for mark, has in found.items() if has)


def _marks(row: Row) -> list[str]:
    return [*row["aliases"], *(["yanked"] if row["yanked"] is not None else [])]


def _spark(losses: Sequence[float | None]) -> tuple[list[tuple[float, float]], bool]:
    """Places of losses along a small line, and whether the last version has one."""
    known = [(place, math.log(value)) for place, value in enumerate(losses) if value and value > 0]
    if not known:
        return [], False
    low, high = min(value for _, value in known), max(value for _, value in known)
    at = [
        (4 + 76 * place / max(1, len(losses) - 1), 16 - 12 * (value - low) / ((high - low) or 1.0))
        for place, value in known
    ]
    return at, known[-1][0] == len(losses) - 1
