"""Keep a registry in order: find what is wrong with it, and remove what nothing names.

Only temporary files, and blobs that no event names, are ever removed, and only when they are older than a grace period:
a publish writes its blobs before its event.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from kvq_runtime import artifact, faults, files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registries import evaluations, events
from kvq_runtime.registries.local import LocalRegistry

GRACE = 24 * 3600.0


@dataclass(frozen=True)
class Finding:
    """Something `doctor` has to say: a fault, or a note about what is harmless."""

    level: str
    what: str
    path: str
    advice: str


def named_blobs(registry: LocalRegistry) -> dict[str, bool]:
    """Every digest that an event names: {sha256: whether it is an artifact}; ArtifactError for an unreadable event."""
    found: dict[str, bool] = {}
    for name in registry.names():
        for version in registry.state(name).versions.values():
            found.update({entry["sha256"]: found.get(entry["sha256"], False) for entry in version.files.values()})
            found[version.sha256] = True
    return found


def collect(registry: LocalRegistry, grace: float = GRACE, dry_run: bool = False) -> list[Path]:
    """Remove temporary files and unnamed blobs older than `grace` seconds; returns them.

    A registry with an unreadable event is left alone (ArtifactError): what it names is not known.
    """
    named, before = named_blobs(registry), time.time() - grace
    drafts = [path for path in sorted(registry.root.glob("tmp/.*.tmp")) if _older(path, before)]
    orphans = [path for path in _blobs(registry) if path.name not in named and _older(path, before)]
    if dry_run:
        return [*drafts, *orphans]
    for path in drafts:
        sha256 = path.name[1 : -len(".tmp")]
        if sha256 in named and not registry.blob(sha256).exists():  # a gc stopped between its two looks
            path.rename(registry.blob(sha256))
        path.unlink(missing_ok=True)
        faults.point("gc.draft")
    return [*drafts, *(path for path in orphans if _older(path, before) and _remove_blob(registry, path, before))]


def _remove_blob(registry: LocalRegistry, path: Path, before: float) -> bool:
    """Move a blob aside, look again, and only then delete it.

    A publish writes its blob anew before its event, so what turns out young may be about to be named: it goes back at
    once. What is old was not written by a publish of now; if one that slept for the whole grace named it, it goes back.
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
    try:
        return path.lstat().st_mtime <= before
    except FileNotFoundError:
        return False


def _blobs(registry: LocalRegistry) -> list[Path]:
    return sorted(registry.root.glob("blobs/sha256/*"))


def examine(registry: LocalRegistry) -> list[Finding]:
    """Everything wrong with events, blobs (by content) and evaluations; unfinished and unnamed files as notes."""
    found, named, readable = [], {}, True
    for folder in sorted(registry.root.glob("names/*")):
        problems, blobs = _examine_name(registry, folder)
        found += problems
        named |= blobs
        readable = readable and not problems
    found += _examine_blobs(registry, named, readable)
    for path in sorted(registry.root.glob("evaluations/*/*")):
        found += _try(lambda path=path: evaluations.read(path), path, "delete it, and evaluate again")
    for path in sorted(registry.root.glob("signatures/*/*")):
        found += _try(lambda path=path: _check_digest(path, path.stem), path, "delete it, and sign again")
    for path in sorted(registry.root.glob("tmp/*")):
        advice = "left by a process that stopped, or that is writing now; kvq gc removes it when it is old"
        found.append(Finding("note", "temporary file", str(path), advice))
    return found


def _try(action, path: Path, advice: str) -> list[Finding]:
    try:
        action()
    except (ArtifactError, OSError, ValueError) as error:
        return [Finding("fault", str(error).removeprefix(f"{path}: "), str(path), advice)]
    return []


def _examine_name(registry: LocalRegistry, folder: Path) -> tuple[list[Finding], dict[str, bool]]:
    """Every event that cannot be read or is missing; and, from those that can, the blobs they name."""
    advice = "restore this file from a copy of the registry; events after it are kept, and nothing was removed"
    try:
        paths = {path.name: path for path in registry.events_folder(folder.name).iterdir()}
    except FileNotFoundError:  # a first publish stopped before its event
        return [], {}
    except (ValueError, OSError) as error:
        return [Finding("fault", f"no folder of events: {error}", str(folder), "move it out of the registry")], {}
    last = max((int(name[:8]) for name in paths if name[:8].isdecimal()), default=0)
    found, whole = [], []
    for number in range(1, last + 1):
        path = registry.events_folder(folder.name) / f"{number:08}.json"
        if paths.pop(path.name, None) is None:
            found.append(Finding("fault", f"event {number} of {last} is missing", str(path), advice))
            continue
        found += _try(lambda n=number: whole.append(registry.event(folder.name, n)), path, advice)
    strange = "not an event; move it out of the registry"
    found += [Finding("fault", "not an event's name", str(path), strange) for path in paths.values()]
    if not found:
        found += _try(lambda: events.fold(folder.name, whole), registry.events_folder(folder.name), advice)
    changes = [event.change for event in whole if isinstance(event.change, events.Publish)]
    named = {entry["sha256"]: False for change in changes for entry in change.files.values()}
    return found, named | {change.sha256: True for change in changes}


def _examine_blobs(registry: LocalRegistry, named: dict[str, bool], readable: bool) -> list[Finding]:
    found, there = [], {path.name: path for path in _blobs(registry)}
    again = "publish the same bytes again, or copy it from elsewhere; until then yank the version"
    for sha256, is_artifact in sorted(named.items()):
        path = there.pop(sha256, None)
        if path is None:
            found.append(Finding("fault", "blob is missing", str(registry.blob(sha256)), again))
        elif is_artifact:
            found += _try(lambda p=path, s=sha256: artifact.load(p, s), path, again)
        else:
            found += _try(lambda p=path, s=sha256: _check_digest(p, s), path, again)
    advice = (
        "kvq gc removes it when it is old" if readable else "an event that cannot be read may name it; mend that first"
    )
    return found + [Finding("note", "no event names it", str(path), advice) for path in there.values()]


def _check_digest(path: Path, sha256: str) -> None:
    found, _ = files.digest(path)
    if found != sha256:
        raise ArtifactError(f"sha256: the file has {found}; it was changed")
