"""Gather what is known of every version of a registry, as JSON, and write its index page.

No file is loaded as a whole, so that 500 models take seconds: a row a version is read from events, headers and records.
What cannot be read is a row with the reason.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from kvq_calib.report import evidence, html
from kvq_calib.report.tables import figure
from kvq_calib.report.version_page import aliases
from kvq_runtime import __version__
from kvq_runtime.cli.table import percent
from kvq_runtime.errors import ArtifactError, NotFound, counted
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import FULL, SPOKEN, readable
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.reference import PRODUCTION, order
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.memory import human

Row = Mapping[str, Any]
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
    """Yield the rows of a name, the newest version first."""
    newest, production = state.newest(), state.at(PRODUCTION)
    rows: list[dict[str, Any]] = []
    for version in sorted(state.versions.values(), key=lambda one: order(one.version)):
        row: dict[str, Any] = {"name": state.name, "version": version.version, "published": version.at}
        row["days"] = max(0, (now - datetime.fromisoformat(version.at)).days)
        row |= {"size": version.size, "sha256": version.sha256, "yanked": version.yanked}
        row |= {"production": version.version == production, "newest": newest is not None and version == newest}
        row |= {"aliases": aliases(state, version)}
        row |= {field: version.about[field] for field in ("recipe", "model", "corpus")} | {"damage": None}
        row |= _loss(registry, state.name, version, row["corpus"])
        rows.append(row | {"needs": _needs(row)})
    yield from reversed(rows)


def _loss(registry: Registry, name: str, version: Version, fitted: str | None) -> dict[str, Any]:
    """Bits, the loss that counts, the last verdict on bounds, and the loss of the last weekly check."""
    found: dict[str, Any] = dict.fromkeys(("bits", "kl", "relative", "protocol", "parameters", "week", "drift", "why"))
    found["verdict"] = rating.NOT_MEASURED
    try:
        records = readable(registry.evaluations(version.sha256, name))
    except UNREADABLE as error:
        return found | {"failed": [], "damage": str(error)}
    main = rating.main_record(records, fitted)
    verdicts, judged = evidence.gate(records), rating.rate(main)
    found["failed"] = verdicts[-1]["failed"] if verdicts else []
    found |= {"verdict": judged.word, "why": judged.why}
    if main is None:
        return found
    row = evidence.deciding(evidence.losses(main))
    found |= {"bits": main.result.bits.get("asymptotic"), "parameters": main.protocol.model.parameters}
    found |= {name: row[name] for name in ("kl", "relative", "protocol")} if row else {}
    weeks = evidence.weekly(records)
    if weeks and weeks[-1]["kl"] is not None and rating.drift_week(main) is None and found["kl"]:
        found |= {"week": weeks[-1]["week"], "drift": weeks[-1]["kl"] / found["kl"]}
    return found


def _needs(row: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a version needs attention."""
    said = []
    if row["damage"] is not None:
        said.append(f"cannot be read: {row['damage']}")
    if row["failed"]:
        said.append("exceeds its bounds: " + "; ".join(row["failed"]))
    elif row["verdict"] == rating.LOSSY:
        said.append(f"{row['verdict']}: {row['why']}")
    if row["drift"] is not None and row["drift"] > DRIFTED:
        said.append(f"drifted: {row['drift']:.2f} times the divergence at publication")
    if row["kl"] is None and row["damage"] is None and (row["newest"] or row["production"]):
        said.append("not measured: kvq eval")
    return said


def page(whole: Mapping[str, Any]) -> str:
    """Write the whole page."""
    versions = whole["versions"]
    names = counted(len({row["name"] for row in versions}), "name")
    return html.page(
        "registry.html",
        whole=whole,
        heading=f"Registry: {names}, {counted(len(versions), 'version')}",
        rows=[(row, _cells(row)) for row in versions],
    )


def _cells(row: Row) -> list[str]:
    """Return the cells between verdict and what needs attention."""
    protocol = "" if row["protocol"] in (None, FULL) else f" {SPOKEN[row['protocol']]}"
    return [
        "" if row["relative"] is None else percent(row["relative"]),
        figure(row["bits"]),
        figure(row["kl"]) + protocol,
        ", ".join([*row["aliases"], *(["yanked"] if row["yanked"] is not None else [])]),
        row["recipe"],
        row["model"],
        figure(row["drift"], ".2f"),
        str(row["days"]),
        human(row["size"]),
    ]
