"""Check a registry in a folder, and remove files that no event names.

Only temporary files and unnamed blobs are ever removed, and only if they are older than a grace period: a publish
writes its blobs before the event that names them. Links are never followed to what is removed.
"""

import re
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import faults, files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import evaluations, events, reference
from kvq_runtime.registry.local.registry import LocalRegistry
from kvq_runtime.registry.place import GRACE, Finding

_EVENT = re.compile(r"(?!0{8})[0-9]{8}\.json")


def named_blobs(registry: LocalRegistry) -> dict[str, bool]:
    """{sha256: whether it is an artifact} of every blob that an event names; ArtifactError for a damaged event."""
    named: dict[str, bool] = {}
    for name in registry.names():
        for version in registry.state(name).versions.values():
            named.update({entry["sha256"]: named.get(entry["sha256"], False) for entry in version.files.values()})
            named[version.sha256] = True
    return named


def collect(registry: LocalRegistry, grace: float = GRACE, dry_run: bool = False) -> list[Path]:
    """Remove temporary files and unnamed blobs older than `grace` seconds; returns their paths.

    dry_run   remove nothing
    Raises ArtifactError, and removes nothing, if an event is damaged: it may name any blob.
    """
    for folder in ("blobs", "blobs/sha256", "tmp"):
        if (registry.root / folder).is_symlink():
            text = "a link, and gc removes nothing outside the registry; put the folder itself there"
            raise ArtifactError(f"{registry.root / folder}: {text}")
    named, before = named_blobs(registry), time.time() - grace
    drafts = [path for path in sorted(registry.root.glob("tmp/.*.tmp")) if _older(path, before)]
    blobs = [path for path in _blobs(registry) if reference.is_sha256(path.name)]
    orphans = [path for path in blobs if path.name not in named and _older(path, before)]
    if dry_run:
        return [*drafts, *orphans]
    for path in drafts:
        sha256 = path.name[1 : -len(".tmp")]
        if sha256 in named and not registry.blob(sha256).exists():  # a gc was killed after moving it aside
            path.rename(registry.blob(sha256))
        path.unlink(missing_ok=True)
        faults.point("gc.draft")
    return [*drafts, *(path for path in orphans if _older(path, before) and _remove_blob(registry, path, before))]


def _remove_blob(registry: LocalRegistry, path: Path, before: float) -> bool:
    """Move a blob aside, check it again, and only then delete it.

    A publish rewrites its blob before its event, so a young blob may be about to be named: restore it. An old one was
    not written by a running publish; but if a publish that stalled past the grace period has named it, restore it.
    """
    aside = registry.root / "tmp" / f".{path.name}.tmp"
    aside.parent.mkdir(exist_ok=True)
    path.rename(aside)
    faults.point("gc.aside")
    if not _older(aside, before) or path.name in named_blobs(registry):
        aside.rename(path)
        return False
    aside.unlink()
    faults.point("gc.blob")
    return True


def _older(path: Path, before: float) -> bool:
    """True if a path is a regular file, not changed since `before`."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime <= before


def _blobs(registry: LocalRegistry) -> list[Path]:
    return sorted(registry.root.glob("blobs/sha256/*"))


def examine(registry: LocalRegistry) -> list[Finding]:
    """Everything wrong with events, blobs (by content) and evaluations; unfinished and unnamed files as notes."""
    findings, named, readable = [], {}, True
    for folder in sorted(registry.root.glob("names/*")):
        problems, blobs = _examine_name(registry, folder)
        findings += problems
        named |= blobs
        readable = readable and not problems
    findings += _examine_blobs(registry, named, readable)
    for path in sorted(registry.root.glob("evaluations/*/*")):
        findings += _attempt(lambda path=path: evaluations.read(path), path, "delete it, and evaluate again")
    for path in sorted(registry.root.glob("signatures/*/*")):
        findings += _attempt(lambda path=path: _check_digest(path, path.stem), path, "delete it, and sign again")
    for path in sorted(registry.root.glob("tmp/*")):
        advice = "left by a killed process, or being written now; kvq gc removes it when it is old"
        findings.append(Finding("note", "temporary file", str(path), advice))
    return findings


def _attempt(action: Callable[[], object], path: Path, advice: str) -> list[Finding]:
    """The error of an action as a fault; nothing if it succeeds."""
    try:
        action()
    except (ArtifactError, OSError, ValueError) as error:
        return [Finding("fault", str(error).removeprefix(f"{path}: "), str(path), advice)]
    return []


def _examine_name(registry: LocalRegistry, folder: Path) -> tuple[list[Finding], dict[str, bool]]:
    """Findings about the events of a name, and {sha256: whether it is an artifact} that the readable ones name."""
    advice = "restore this file from a backup of the registry; later events are kept, and nothing was removed"
    try:
        paths = {path.name: path for path in registry.events_folder(folder.name).iterdir()}
    except FileNotFoundError:  # the first publish was killed before its event
        return [], {}
    except (ValueError, OSError) as error:
        return [Finding("fault", f"no folder of events: {error}", str(folder), "move it out of the registry")], {}
    numbers = [int(name[:8]) for name in sorted(paths) if _EVENT.fullmatch(name)]
    findings, whole = [], []
    for first, last in _gaps(numbers):
        what = (
            f"event {first} of {numbers[-1]} is" if first == last else f"events {first} to {last} of {numbers[-1]} are"
        )
        path = registry.events_folder(folder.name) / f"{first:08}.json"
        findings.append(Finding("fault", f"{what} missing", str(path), advice))
    for number in numbers:
        path = paths.pop(f"{number:08}.json")
        findings += _attempt(lambda n=number: whole.append(registry.event(folder.name, n)), path, advice)
    foreign = "not an event; move it out of the registry"
    findings += [Finding("fault", "not an event's name", str(path), foreign) for path in paths.values()]
    if not findings:
        findings += _attempt(lambda: events.fold(folder.name, whole), registry.events_folder(folder.name), advice)
    changes = [event.change for event in whole if isinstance(event.change, events.Publish)]
    named = {entry["sha256"]: False for change in changes for entry in change.files.values()}
    return findings, named | {change.sha256: True for change in changes}


def _gaps(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """The first and the last of the numbers that are missing between 1 and the last, run by run."""
    for before, number in zip([0, *numbers], numbers, strict=False):
        if number > before + 1:
            yield before + 1, number - 1


def _examine_blobs(registry: LocalRegistry, named: dict[str, bool], readable: bool) -> list[Finding]:
    findings, blobs = [], {path.name: path for path in _blobs(registry)}
    advice = "publish the same bytes again, or copy the blob from elsewhere; until then yank the version"
    for sha256, is_artifact in sorted(named.items()):
        path = blobs.pop(sha256, None)
        if path is None:
            findings.append(Finding("fault", "blob is missing", str(registry.blob(sha256)), advice))
        elif is_artifact:
            findings += _attempt(lambda p=path, s=sha256: artifact.load(p, s), path, advice)
        else:
            findings += _attempt(lambda p=path, s=sha256: _check_digest(p, s), path, advice)
    advice = "kvq gc removes it when it is old" if readable else "a damaged event may name it; repair that first"
    for name, path in blobs.items():
        if reference.is_sha256(name) and path.is_file() and not path.is_symlink():
            findings.append(Finding("note", "no event names it", str(path), advice))
        else:
            findings.append(Finding("note", "not a blob", str(path), "move it out of the registry"))
    return findings


def _check_digest(path: Path, sha256: str) -> None:
    digest, _ = files.digest(path)
    if digest != sha256:
        raise ArtifactError(f"sha256: the file has {digest}; it was changed")
