"""Copy versions from one registry to another, of whatever kind: bytes, number, card, plots, records.

A copy may be repeated, and goes on where it was: what is there is left alone, what is there otherwise is a Conflict.
"""

from collections.abc import Iterator
from typing import Any

from kvq_runtime import artifact, files
from kvq_runtime.errors import Conflict
from kvq_runtime.registries import card
from kvq_runtime.registries.changes import Kind, Registry, same
from kvq_runtime.registries.events import State, Version


def copy(source: Registry, name: str, version: Version, target: Registry, dry_run: bool = False) -> dict[str, Any]:
    """Copy one version under its number; returns what was done, or with `dry_run` what would be."""
    _check_number(target.now(name), version, target.url)
    there = same(target.now(name), version.sha256) is not None
    records = source.evaluations(version.sha256, name)
    row = {"name": name, "version": version.version, "sha256": version.sha256, "size": version.size}
    row |= {"from": source.url, "to": target.url, "files": sorted(version.files), "evaluations": len(records)}
    if dry_run:
        target.check_writable()
        return row | {"result": "is there already" if there else "would be published"}
    if there:
        target.settle(name, version)
    else:
        data = files.read(source.whole(name, version), version.size)
        artifact.from_bytes(data, version.sha256)
        beside = source.beside(name, version)
        if "README.md" in beside:
            text = card.addressed(beside["README.md"].decode(), target.url, name, version.version)
            beside["README.md"] = card.measured(text, name, records).encode()
        target.publish(name, data, version.version, beside)
    kinds: tuple[Kind, ...] = ("evaluations", "signatures")
    for kind in kinds:
        known = [data for _, data in target.records(kind, version.sha256, name)]
        for _, data in source.records(kind, version.sha256, name):
            if data not in known:
                target.add_record(kind, version.sha256, data, name)
    return row | {"result": "was there already" if there else "published"}


def mirror(source: Registry, name: str, target: Registry, dry_run: bool = False) -> Iterator[dict[str, Any]]:
    """Copy every version of a name, then bring its aliases and yanks to what they are in the source."""
    state = source.existing(name)
    for version in state.versions.values():
        yield copy(source, name, version, target, dry_run)
    there = target.now(name)
    for alias in state.aliases:  # before yanks: what is yanked may be an alias' old version
        wanted = state.at(alias)
        if wanted is not None and there.at(alias) != wanted:
            if not dry_run:
                target.promote(name, wanted, alias, there.at(alias) or "none")
            yield _row(name, wanted, source, target, f"is {alias}", dry_run)
    for version in state.versions.values():
        if version.yanked is not None and (dry_run or target.now(name).get(version.version).yanked is None):
            if not dry_run:
                target.yank(name, version.version, version.yanked)
            yield _row(name, version.version, source, target, "yanked", dry_run)


def _row(name: str, version: str, source: Registry, target: Registry, what: str, dry_run: bool) -> dict[str, Any]:
    said = f"would be: {what}" if dry_run else what
    return {"name": name, "version": version, "from": source.url, "to": target.url, "result": said}


def _check_number(there: State, version: Version, url: str) -> None:
    found = same(there, version.sha256)
    if found is not None and found.version != version.version:
        raise Conflict(f"{url} has these bytes of {there.name} as {found.version}, not {version.version}; use that")
    taken = there.versions.get(version.version)
    if taken is not None and taken.sha256 != version.sha256:
        raise Conflict(
            f"{url} has other bytes as {there.name} {version.version} (sha256 {taken.sha256[:12]}); a version never "
            "changes: publish these under another number (kvq-calibrate --version)"
        )
