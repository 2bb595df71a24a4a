"""Keep a registry as files, in a folder or a bucket that many processes share without a lock.

    blobs/sha256/<hex>                          artifacts, cards and plots, named by their digest
    names/<name>/events/00000042.json           the changes of a name, one file each: see events.py
    evaluations/<sha256>/<sha256 of file>.json  measurements of an artifact, added later, never changed
    signatures/<sha256>/<sha256 of file>.json   signatures of it

A change is decided from the present events, and claims the next number, which one process gets. If another took it:
read, decide and claim again. A blob is there before an event names it.
"""

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256 as hash_of
from pathlib import PurePath
from typing import Any

from kvq_runtime.disk import faults, files
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import events, reference, sound
from kvq_runtime.registry.events import Event, Fold, Publish, State, Version
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.registry import GRACE, Finding, Head, Registry

BLOBS = "blobs/sha256"
_EVENT_LIMIT = 1 << 16
_EVENT = re.compile(r"(?!0{8})[0-9]{8}\.json")


class TreeRegistry(Registry):
    """A registry of files; a `path` below is relative to its root, as in "blobs/sha256/<hex>"."""

    # ---- what a tree of files does

    @abstractmethod
    def at(self, path: str) -> Any:
        """The file's own path or key, whether it exists or not."""

    @abstractmethod
    def address(self, path: str) -> str:
        """A path as messages name it."""

    @abstractmethod
    def entries(self, folder: str) -> list[str]:
        """The names right below a folder, in order; none if there is no such folder, NotADirectoryError for a file."""

    @abstractmethod
    def has(self, path: str) -> bool:
        """True if a file is there."""

    @abstractmethod
    def content(self, path: str, limit: int) -> bytes:
        """All of a file. NotFound: there is none; ArtifactError: it is longer than the limit."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a file, replacing one that is there: that repairs it, and resets its age for gc."""

    @abstractmethod
    def claim(self, path: str, data: bytes) -> bool:
        """Write a file that is not there; False, and nothing is written, if it is."""

    @abstractmethod
    def changed(self) -> dict[str, float]:
        """{name: time of its last change} of the files among blobs."""

    # ---- reading

    def blob(self, sha256: str) -> Any:
        """Where the blob with this digest is, whether it exists or not."""
        return self.at(_blob(sha256))

    def events_folder(self, name: str) -> Any:
        """Where a name's events are, whether there are any or not."""
        return self.at(_events(name))

    def names(self) -> list[str]:
        """Every name with at least one event, or whose events may not be read: whoever reads it is told."""
        found = []
        for name in filter(reference.is_name, self.entries("names")):
            try:
                found += [name] if self._numbers(name) else []
            except PermissionError:
                found.append(name)
        return found

    def _numbers(self, name: str) -> list[int]:
        with suppress(NotADirectoryError):
            return [int(file[:8]) for file in self.entries(_events(name)) if _EVENT.fullmatch(file)]
        return []

    def event(self, name: str, number: int) -> Event:
        """One event of a name; raises ArtifactError naming the file if it is missing or malformed."""
        path = _event(name, number)
        where = self.address(path)
        try:
            return events.from_bytes(self.content(path, _EVENT_LIMIT), number, name)
        except NotFound:
            said = "event: missing, though later ones are there"
        except ArtifactError as error:
            said = str(error).removeprefix(f"{where}: ")
        raise ArtifactError(f"{where}: {said}; kvq doctor says what to do")

    def look(self, name: str) -> Head:
        """Versions, aliases and history of a name; empty if nothing was published under it."""
        fold = Fold(State(name))
        # a listing may miss a new file, but every event before a listed one exists
        for number in range(1, max(self._numbers(name), default=0) + 1):
            event = self.event(name, number)
            try:
                fold.add(event)
            except ArtifactError as error:
                where = self.address(_event(name, number))
                raise ArtifactError(f"{where}: event: contradicts the events before it: {error}") from None
        return Head(fold.state())

    def listed(self, name: str, folder: str) -> list[tuple[PurePath, bytes]]:
        """(path, content) of every .json file of a folder, by path."""
        paths = [f"{folder}/{file}" for file in self.entries(folder) if file.endswith(".json")]
        return [(PurePath(self.at(path)), self.content(path, sound.LIMIT)) for path in paths]

    # ---- changing

    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Claim the next number; None if another process took it."""
        event = after.events[-1]
        return Head(after) if self.claim(_event(after.name, event.number), event.to_bytes()) else None

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their digest, and return it."""
        sha256 = hash_of(data).hexdigest()
        self.put(_blob(sha256), data)
        return sha256

    def store(self, name: str, content: Mapping[str, bytes]) -> None:
        """Put every file into its blob, unless the history of the name is damaged."""
        self.look(name)
        for data in content.values():
            self.put_blob(data)
            faults.point("publish.blob")

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Write blobs again that gc took before their event."""
        if version is None:
            return
        faults.point("publish.event")
        for data in (content or {}).values():
            if not self.has(_blob(hash_of(data).hexdigest())):
                self.put_blob(data)

    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a file that never changes; the name is not needed here."""
        self.claim(path, data)

    # ---- upkeep

    def collect(self, grace: float = GRACE, dry_run: bool = False) -> list[str]:
        """Remove drafts, and blobs that no event names: a publish writes its blobs anew before its event, so they are
        young."""
        before, named = time.time() - grace, self.named()
        drafts = self.remove_drafts(named, before, dry_run)
        old = [name for name, changed in self.changed().items() if reference.is_sha256(name) and changed <= before]
        orphans = [sha256 for sha256 in old if sha256 not in named]
        removed = orphans if dry_run else self.remove_blobs(orphans, before)
        return [*drafts, *(self.address(_blob(sha256)) for sha256 in removed)]

    def remove_drafts(self, named: set[str], before: float, dry_run: bool) -> list[str]:
        """Remove what killed processes left half written, not changed since `before`, where a place has that."""
        return []

    @abstractmethod
    def remove_blobs(self, orphans: list[str], before: float) -> list[str]:
        """Remove these blobs, except those that were written since `before` or named meanwhile; returns the removed."""

    def named(self) -> set[str]:
        """The digest of every blob that an event names; ArtifactError for a damaged event."""
        versions = (version for name in self.names() for version in self.state(name).versions.values())
        return {version.file(file)[0] for version in versions for file in (ARTIFACT_FILE, *version.files)}

    def examine(self) -> list[Finding]:
        """Everything wrong with events, blobs (by content) and records; unnamed files as notes."""
        findings: list[Finding] = []
        named: dict[str, tuple[str, Version, str]] = {}
        for name in self.entries("names"):
            problems, blobs = self._examine_name(name)
            findings += problems
            named |= blobs
        findings += self._examine_blobs(named, readable=not findings)
        for kind, again in (("evaluations", "evaluate"), ("signatures", "sign")):
            advice = f"delete it, and {again} again"
            for path in self._records(kind):
                findings += self._attempt(lambda path=path: self._check_record(path), path, advice)
        return findings

    def _attempt(self, action: Callable[[], object], path: str, advice: str) -> list[Finding]:
        """The error of an action as a fault; nothing if it succeeds."""
        try:
            action()
        except (ArtifactError, OSError, ValueError) as error:
            where = self.address(path)
            return [Finding("fault", str(error).removeprefix(f"{where}: "), where, advice)]
        return []

    def _examine_name(self, name: str) -> tuple[list[Finding], dict[str, tuple[str, Version, str]]]:
        """Findings about the events of a name, and {sha256: (name, version, file)} that the readable ones name."""
        advice = "restore this file from a backup of the registry; later events are kept, and nothing was removed"
        try:
            folder = _events(name)
            listed = self.entries(folder)
        except (ValueError, OSError) as error:
            where = self.address(f"names/{name}")
            return [Finding("fault", f"no folder of events: {error}", where, "move it out of the registry")], {}
        numbers = [int(file[:8]) for file in listed if _EVENT.fullmatch(file)]
        findings, whole = [], list[Event]()
        for first, last in _gaps(numbers):
            some, are = (f"event {first}", "is") if first == last else (f"events {first} to {last}", "are")
            what = f"{some} of {numbers[-1]} {are} missing"
            findings.append(Finding("fault", what, self.address(_event(name, first)), advice))
        for number in numbers:
            findings += self._attempt(lambda n=number: whole.append(self.event(name, n)), _event(name, number), advice)
        foreign = "not an event; move it out of the registry"
        for file in (file for file in listed if not _EVENT.fullmatch(file)):
            findings.append(Finding("fault", "not an event's name", self.address(f"{folder}/{file}"), foreign))
        if not findings:
            findings += self._attempt(lambda: events.fold(name, whole), folder, advice)
        published = [(event.change, event.at) for event in whole if isinstance(event.change, Publish)]
        versions = [Version(one.version, one.sha256, one.size, one.files, at) for one, at in published]
        files = ((version, file) for version in versions for file in (*version.files, ARTIFACT_FILE))
        return findings, {version.file(file)[0]: (name, version, file) for version, file in files}

    def _examine_blobs(self, named: dict[str, tuple[str, Version, str]], readable: bool) -> list[Finding]:
        findings, listed = [], self.entries(BLOBS)
        blobs = {name for name in self.changed() if reference.is_sha256(name)}
        advice = "publish the same bytes again, or copy the blob from elsewhere; until then yank the version"
        for sha256, version in sorted(named.items()):
            if sha256 in listed:
                findings += self._attempt(lambda s=sha256, v=version: self._check_blob(s, *v), _blob(sha256), advice)
            else:
                findings.append(Finding("fault", "blob is missing", self.address(_blob(sha256)), advice))
        unnamed = "kvq gc removes it when it is old" if readable else "a damaged event may name it; repair that first"
        for name in (name for name in listed if name not in named):
            what, advice = "no event names it", unnamed
            if name not in blobs:
                what, advice = "not a blob", "move it out of the registry"
            findings.append(Finding("note", what, self.address(f"{BLOBS}/{name}"), advice))
        return findings

    def _check_blob(self, sha256: str, name: str, version: Version, file: str) -> None:
        from kvq_runtime.artifact import artifact  # imports torch, which kvq list should not wait for

        path = self.fetch_verified(name, version, file)
        if file == ARTIFACT_FILE:
            artifact.load(path, sha256)
        else:
            _check_digest(files.digest(path)[0], sha256)

    def _records(self, kind: str) -> Iterator[str]:
        for sha256 in self.entries(kind):
            with suppress(NotADirectoryError):
                yield from (f"{kind}/{sha256}/{file}" for file in self.entries(f"{kind}/{sha256}"))

    def _check_record(self, path: str) -> None:
        data, where = self.content(path, sound.LIMIT), PurePath(self.at(path))
        if path.startswith("evaluations/"):
            sound.from_bytes(data, where)
        else:
            _check_digest(hash_of(data).hexdigest(), where.stem)


def _blob(sha256: str) -> str:
    return f"{BLOBS}/{reference.check_sha256(sha256)}"


def _events(name: str) -> str:
    return f"names/{reference.check_name(name)}/events"


def _event(name: str, number: int) -> str:
    return f"{_events(name)}/{number:08}.json"


def _check_digest(found: str, sha256: str) -> None:
    if found != sha256:
        raise ArtifactError(f"sha256: the file has {found}; it was changed")


def _gaps(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of the numbers that are missing between 1 and the last, run by run."""
    for before, number in zip([0, *numbers], numbers, strict=False):
        if number > before + 1:
            yield before + 1, number - 1
