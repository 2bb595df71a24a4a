"""Gather what is known of every version of a registry, as JSON: a row a version, read from events, headers and records.

No file is loaded as a whole, so that 500 models take seconds. What cannot be read is a row with the reason.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from kvq_calib.report.page import losses
from kvq_runtime import __version__
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import verdict
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.reference import PRODUCTION, order
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.sound import sound

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
        row |= {
            "days": _days(version.at, now),
            "size": version.size,
            "sha256": version.sha256,
            "yanked": version.yanked,
        }
        row |= {"production": version.version == production, "newest": newest is not None and version == newest}
        row |= {"aliases": [alias for alias in state.aliases if state.at(alias) == version.version]}
        row |= _about(registry, state.name, version)
        row |= _loss(registry, state.name, version, row["corpus"])
        row["losses"] = [one["kl"] for one in rows] + [row["kl"]]
        rows.append(row | {"needs": _needs(row)})
    yield from reversed(rows)


def _days(at: str, now: datetime) -> int:
    return max(0, (now - datetime.fromisoformat(at)).days)


def _about(registry: Registry, name: str, version: Version) -> dict[str, Any]:
    try:
        about = registry.about(name, version)
        return {field: about[field] for field in ("recipe", "model", "corpus")} | {"damage": None}
    except UNREADABLE as error:
        return {"recipe": None, "model": None, "corpus": None, "damage": str(error)}


def _loss(registry: Registry, name: str, version: Version, fitted: str | None) -> dict[str, Any]:
    """Bits, the loss that counts, the last verdict on bounds, and the loss of the last weekly check."""
    found: dict[str, Any] = dict.fromkeys(("bits", "kl", "relative", "protocol", "parameters", "week", "drift", "why"))
    found["verdict"] = verdict.NOT_MEASURED
    try:
        records = sound(registry.evaluations(version.sha256, name))
    except UNREADABLE as error:
        return found | {"failed": [], "damage": str(error)}
    main = verdict.main(records, fitted)
    verdicts = losses.gate(records)
    found["failed"] = verdicts[-1]["failed"] if verdicts else []
    judged = verdict.of_records(records, fitted)
    found |= {"verdict": judged.word, "why": judged.why}
    if main is None:
        return found
    row = losses.deciding(losses.rows(main))
    found |= {"bits": main.result.bits.get("asymptotic"), "parameters": main.protocol.model.parameters}
    found |= {name: row[name] for name in ("kl", "relative", "protocol")} if row else {}
    weeks = losses.weekly(records)
    if weeks and weeks[-1]["kl"] is not None and losses.week(main) is None and found["kl"]:
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
