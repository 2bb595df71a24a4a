"""Check that a version is whole: the checks of `kvq verify`, its attachments, its signatures."""

from typing import Any

from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import CHECKS, Artifact
from kvq_runtime.cli.version import MEANINGS
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.lock import read_signature
from kvq_runtime.registry.measured import Record
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.sound import sound

OK, FAILED, NOT_REACHED, NOT_COMPARED = "ok", "failed", "not reached", "not compared"


def checked(registry: Registry, name: str, version: Version) -> tuple[list[dict[str, Any]], Artifact | None]:
    """A row a check of the version's file, and the artifact if it passed them all."""
    try:
        path = registry.fetch_verified(name, version)
        made = artifact.load(path, version.sha256, version.size)
    except (ArtifactError, NotFound) as error:
        return _failed(str(error)), None
    return passed(), made


def passed(registry: bool = True) -> list[dict[str, Any]]:
    """The rows of a file that loaded; without a registry there was no size and digest to compare."""
    return [
        _row(check, OK if registry or check not in ("size", "sha256") else NOT_COMPARED, MEANINGS[check])
        for check in CHECKS
    ]


def _failed(message: str) -> list[dict[str, Any]]:
    """The rows of a file that did not load: the first check that the message names failed."""
    parts = message.split(": ")
    failed = next((check for part in parts for check in CHECKS if part == check), CHECKS[0])
    rows, result = [], OK
    for check in CHECKS:
        if check == failed:
            rows.append(_row(check, FAILED, message))
            result = NOT_REACHED
        else:
            rows.append(_row(check, result, MEANINGS[check]))
    return rows


def beside(registry: Registry, name: str, version: Version) -> list[dict[str, Any]]:
    """Rows about attachments, signatures and a withdrawal."""
    rows = []
    try:
        files = registry.attachments(name, version)
        rows.append(_row("attachments", OK, f"{len(files)} files have the digests that the registry states"))
    except (ArtifactError, NotFound) as error:
        rows.append(_row("attachments", FAILED, str(error)))
    rows.append(_signatures(registry, name, version))
    if version.yanked is not None:
        rows.append(_row("yanked", FAILED, version.yanked))
    return rows


def evaluations(registry: Registry, name: str, version: Version) -> tuple[list[Record], list[dict[str, Any]]]:
    """The sound evaluation records of a version, and a row on whether all are sound; none if one is damaged."""
    try:
        found = registry.evaluations(version.sha256, name)
    except (ArtifactError, NotFound) as error:
        return [], [_row("evaluations", FAILED, str(error))]
    records, said = sound(found), f"{len(found)} records have the digests that they are named by"
    if len(records) == len(found):
        return records, [_row("evaluations", OK, said)]
    left_out = f"{said}; {len(found) - len(records)} are of a form that is not read, and left out"
    return records, [_row("evaluations", FAILED, left_out)]


def _signatures(registry: Registry, name: str, version: Version) -> dict[str, Any]:
    """Count the signature records of this version; `kvq verify --key` tells whose they are."""
    try:
        records = [read_signature(data) for data in registry.signatures(version.sha256, name)]
    except (ArtifactError, NotFound) as error:
        return _row("signature", FAILED, str(error))
    signed = name, version.version, version.sha256
    found = sum((record["name"], record["version"], record["sha256"]) == signed for record in records)
    if not found:
        return _row("signature", NOT_COMPARED, "none: kvq sign makes one")
    return _row("signature", NOT_COMPARED, f"{found} of this version; kvq verify --key FILE checks whose")


def _row(check: str, result: str, what: str) -> dict[str, Any]:
    return {"check": check, "result": result, "what": what}
