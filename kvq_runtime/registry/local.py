"""Keep a registry as files in a folder that many processes share without a lock.

    blobs/sha256/<hex>                          artifacts, cards and plots, named by their digest
    names/<name>/events/00000042.json           the changes of a name, one file each: see events.py
    evaluations/<sha256>/<sha256 of file>.json  measurements of an artifact, added later, never changed
    signatures/<sha256>/<sha256 of file>.json   signatures of it
    tmp/                                        unfinished files

A change is decided from the present events, and claims the next number, which one process gets. If another took it:
read, decide and claim again. A file is written to tmp/, fsynced, and gets its name by a rename, or, where the name must
be new, by a hard link. It is read-only from then on. A blob is on the disk before an event names it.

Only temporary files and unnamed blobs are ever removed, and only if they are older than a grace period. Links are never
followed to what is removed.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound, spoken
from kvq_runtime.registry import evaluation_records, events, reference
from kvq_runtime.registry.events import Event, Fold, Publish, State, Version
from kvq_runtime.registry.reference import ARTIFACT_FILE, GRACE
from kvq_runtime.registry.registry import Finding, Head, Registry

BLOBS = "blobs/sha256"
_EVENT_LIMIT = 1 << 16
_EVENT = re.compile(r"(?!0{8})[0-9]{8}\.json")
_ASK = "; kvq doctor says what to do"


class LocalRegistry(Registry):
    """A registry in a folder, `root`, which the first publish creates; a `path` below is relative to it.

    restore   what `kvq doctor` advises for an event that is damaged
    """

    restore = "restore this file from a backup of the registry; later events are kept, and nothing was removed"

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self._tmp = self.root / "tmp"

    @property
    def url(self) -> str:
        """Its address, file:///..."""
        return self.root.as_uri()

    def at(self, path: str) -> Path:
        """The file's own path."""
        return self.root / path

    def address(self, path: str) -> str:
        """A path as messages name it."""
        return str(self.root / path)

    def entries(self, folder: str) -> list[str]:
        """The names right below a folder, in order; NotADirectoryError for a link on the way that leads nowhere."""
        path = self.root / folder
        try:
            return sorted(os.listdir(path))
        except NotADirectoryError:
            self._check_is_folder()
            raise
        except FileNotFoundError:
            for one in (path, *path.parents[: len(PurePath(folder).parts) - 1]):
                if one.is_symlink() and not one.exists():
                    raise NotADirectoryError(f"{one}: a link that leads nowhere") from None
            return []

    def has(self, path: str) -> bool:
        """True if a file is there."""
        return (self.root / path).exists()

    def content(self, path: str, limit: int) -> bytes:
        """All of a file."""
        return files.read(self.root / path, limit)

    def put(self, path: str, data: bytes) -> None:
        """Write a file, replacing one that is there."""
        files.replace(self._in_its_folder(path), data, self._tmp)

    def claim(self, path: str, data: bytes) -> bool:
        """Write a file that is not there; False, and nothing is written, if it is."""
        return files.claim(self._in_its_folder(path), data, self._tmp)

    def _in_its_folder(self, path: str) -> Path:
        target = self.root / path
        for folder in (target.parent, self._tmp):
            files.make_folder(folder)
        return target

    def changed(self) -> dict[str, float | None]:
        """{name: time of its last change} of all that is among blobs; None for what is no regular file."""
        found = dict[str, float | None]()
        for name in self.entries(BLOBS):
            with suppress(FileNotFoundError):  # removed meanwhile
                found[name] = _changed(self.root / BLOBS / name)
        return found

    def check_writable(self) -> None:
        """Raise RuntimeError if folder or nearest existing parent is read-only, ArtifactError if that is a file."""
        self._check_is_folder()
        if not os.access(self._nearest(), os.W_OK):
            raise RuntimeError(f"the registry {self.root} cannot be written to; choose another with --registry")

    def _nearest(self) -> Path:
        return next(folder for folder in (self.root, *self.root.parents) if folder.exists())

    def _check_is_folder(self) -> None:
        if not (nearest := self._nearest()).is_dir():
            raise ArtifactError(f"the registry {self.root}: {nearest} is a file; name a folder, which may be new")

    def hint(self, name: str) -> str:
        """Return the end of the message about a missing name, or about a folder that is missing itself."""
        missing = "there is no such folder yet; kvq-calibrate publishes artifacts, and makes it"
        return super().hint(name) if self.root.is_dir() else missing

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """The path of a file's blob."""
        return self.blob(version.content[file][0])

    fetch_verified = fetch  # whoever reads it checks its digest

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from its file's header."""
        return header.summary(header.describe(self.blob(version.sha256)))

    # ---- reading

    def blob(self, sha256: str) -> Any:
        """The path of the blob with this digest, whether it exists or not."""
        return self.at(_blob(sha256))

    def events_folder(self, name: str) -> Any:
        """The path of a name's events, whether there are any or not."""
        return self.at(_events(name))

    def names(self) -> list[str]:
        """Every name with at least one event, or whose events cannot be told: reading it, and `collect`, say why."""
        found = []
        for name in filter(reference.is_name, self.entries("names")):
            try:
                found += [name] if self._numbers(name) else []
            except (ArtifactError, PermissionError):
                found.append(name)
        return found

    def _numbers(self, name: str) -> list[int]:
        """The numbers of a name's events, in order.

        ArtifactError for another .json file among them: it may be an event, and name blobs that no other one does.
        """
        numbers, others = _parted(self._in_folder(_events(name)))
        for file in others:
            if file.endswith(".json"):
                raise ArtifactError(f"{self.address(f'{_events(name)}/{file}')}: event: not the name of one{_ASK}")
        return numbers

    def _in_folder(self, folder: str) -> list[str]:
        """`entries` of what has to be a folder, if it is there; ArtifactError for anything else."""
        try:
            return self.entries(folder)
        except NotADirectoryError as error:
            why = f", {error}" if "nowhere" in str(error) else ""
            raise ArtifactError(f"{self.address(folder)}: no folder{why}{_ASK}") from None

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
        raise ArtifactError(f"{where}: {said}{_ASK}")

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

    def listed(self, name: str, folder: str) -> Iterator[tuple[PurePath, bytes]]:
        """(path, content) of every .json file of a folder, by path.

        None is passed over, as a verdict or a signature may depend on it: ArtifactError if it is no folder, and what
        the place raises where it cannot be read. Other versions, and `kvq list`, do not need it.
        """
        for path in (f"{folder}/{file}" for file in self._in_folder(folder) if file.endswith(".json")):
            yield PurePath(self.at(path)), self.content(path, evaluation_records.LIMIT)

    # ---- changing

    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Claim the next number; None if another process took it."""
        return Head(after) if self.claim_event(after.events[-1]) else None

    def claim_event(self, event: Event) -> bool:
        """Write an event under its number; False if another one has it."""
        return self.claim(_event(event.name, event.number), event.to_bytes())

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
            files.fault_point("publish.blob")

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Sync the events, whose process may have died before; write blobs again that gc took before their event."""
        if version is None:
            files.sync(self.events_folder(name))
            return
        files.fault_point("publish.event")
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
        blobs = [(name, at) for name, at in self.changed().items() if reference.is_sha256(name) and at is not None]
        old = [name for name, at in blobs if at <= before]
        orphans = [sha256 for sha256 in old if sha256 not in named]
        removed = orphans if dry_run else self.remove_blobs(orphans, before)
        return [*drafts, *(self.address(_blob(sha256)) for sha256 in removed)]

    def named(self) -> set[str]:
        """The digest of every blob that an event names; raises for an event that is damaged or cannot be read."""
        versions = (version for name in self.names() for version in self.state(name).versions.values())
        return {sha256 for version in versions for sha256, _ in version.content.values()}

    def examine(self) -> list[Finding]:
        """Everything wrong with events, blobs (by content) and records; unfinished and unnamed files as notes.

        What the place does not let be read is a fault, but no damage. Raises what the place raises if it does not
        answer at all.
        """
        findings: list[Finding] = []
        named: dict[str, tuple[str, Version, str]] = {}
        for name in self._below(findings, "names"):
            problems, blobs = self._examine_name(name)
            findings += problems
            named |= blobs
        findings += self._examine_blobs(named, readable=not findings)
        for kind, (check, advice) in _RECORDS.items():
            for folder in (f"{kind}/{sha256}" for sha256 in self._below(findings, kind)):
                for path in (f"{folder}/{file}" for file in self._below(findings, folder)):
                    findings += self._attempt(path, advice, self._check_record, path, check)
        advice = "left by a killed process, or being written now; kvq gc removes it when it is old"
        drafts = [Finding("note", "temporary file", str(path), advice) for path in sorted(self._tmp.glob("*"))]
        return findings + drafts

    def _below(self, findings: list[Finding], folder: str) -> list[str]:
        """The names right below a folder; if it is none, that is added to the findings."""
        listed = list[str]()
        findings += self._attempt(folder, "move it out of the registry", lambda: listed.extend(self._in_folder(folder)))
        return listed

    def _attempt(self, path: str, advice: str, action: Callable[..., object], *given: Any) -> list[Finding]:
        """The damage that an action finds as a fault, with the advice; nothing if it succeeds.

        What cannot be read may be sound: to replace or remove it could only do harm, so that access is all the advice.
        """
        where = self.address(path)
        try:
            action(*given)
        except ArtifactError as error:
            return [Finding("fault", str(error).removeprefix(f"{where}: ").removesuffix(_ASK), where, advice)]
        except OSError as error:
            access = "change nothing; give access to it (permissions, credentials), and run kvq doctor again"
            return [Finding("fault", f"cannot be read: {spoken(error)}", where, access)]
        return []

    def _examine_name(self, name: str) -> tuple[list[Finding], dict[str, tuple[str, Version, str]]]:
        """Findings about the events of a name, and {sha256: (name, version, file)} that the readable ones name."""
        top, foreign = f"names/{name}", "move it out of the registry"
        try:
            folder = _events(name)
        except ValueError as error:
            return [Finding("fault", f"no folder of events: {error}", self.address(top), foreign)], {}
        listed, whole = list[str](), list[Event]()
        findings = self._attempt(top, foreign, lambda: listed.extend(self._in_folder(folder)))
        numbers, others = _parted(listed)
        for first, last in _gaps(numbers):
            some, are = (f"event {first}", "is") if first == last else (f"events {first} to {last}", "are")
            what = f"{some} of {numbers[-1]} {are} missing"
            findings.append(Finding("fault", what, self.address(_event(name, first)), self.restore))
        for number in numbers:
            path = _event(name, number)
            findings += self._attempt(path, self.restore, lambda n: whole.append(self.event(name, n)), number)
        for file in others:
            advice = f"not an event; {foreign}"
            if file.endswith(".json"):
                advice = f"if it is an event, give it its name, as in 00000042.json; else {foreign}"
            findings.append(Finding("fault", "not an event's name", self.address(f"{folder}/{file}"), advice))
        if not findings:
            findings += self._attempt(folder, self.restore, events.fold, name, whole)
        versions = [Version.of(event.change, event.at) for event in whole if isinstance(event.change, Publish)]
        files = ((version, *one) for version in versions for one in reversed(version.content.items()))
        return findings, {sha256: (name, version, file) for version, file, (sha256, _) in files}

    def _examine_blobs(self, named: dict[str, tuple[str, Version, str]], readable: bool) -> list[Finding]:
        findings, blobs = [], self.changed()
        advice = "publish the same bytes again, or copy the blob from elsewhere; until then yank the version"
        for sha256, version in sorted(named.items()):
            if sha256 in blobs:
                findings += self._attempt(_blob(sha256), advice, self._check_blob, sha256, *version)
            else:
                findings.append(Finding("fault", "blob is missing", self.address(_blob(sha256)), advice))
        unnamed = "kvq gc removes it when it is old" if readable else "a damaged event may name it; repair that first"
        for name in sorted(blobs.keys() - named.keys()):
            what, advice = "no event names it", unnamed
            if blobs[name] is None or not reference.is_sha256(name):
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

    def _check_record(self, path: str, check: Callable[[bytes, PurePath], object]) -> None:
        check(self.content(path, evaluation_records.LIMIT), PurePath(self.at(path)))

    def remove_drafts(self, named: set[str], before: float, dry_run: bool) -> list[str]:
        """Remove temporary files that were not changed since `before`; returns their paths."""
        for folder in ("blobs", BLOBS, "tmp"):
            if (self.root / folder).is_symlink():
                text = "a link, and gc removes nothing outside the registry; put the folder itself there"
                raise ArtifactError(f"{self.root / folder}: {text}")
        drafts = [path for path in sorted(self._tmp.glob(".*.tmp")) if _older(path, before)]
        for path in [] if dry_run else drafts:
            sha256 = path.name[1 : -len(".tmp")]
            if sha256 in named and not self.blob(sha256).exists():  # a gc was killed after moving it aside
                path.rename(self.blob(sha256))
            path.unlink(missing_ok=True)
            files.fault_point("gc.draft")
        return list(map(str, drafts))

    def remove_blobs(self, orphans: list[str], before: float) -> list[str]:
        """Remove these blobs, except those that were written since `before` or named meanwhile; returns the removed."""
        return [sha256 for sha256 in orphans if _older(self.blob(sha256), before) and self._remove(sha256, before)]

    def _remove(self, sha256: str, before: float) -> bool:
        """Move a blob aside, check it again, and only then delete it.

        A publish rewrites its blob before its event, so a young blob may be about to be named: restore it. An old one
        was not written by a running publish; but if a publish that stalled past the grace period has named it, restore
        it.
        """
        path, aside = self.blob(sha256), self._tmp / f".{sha256}.tmp"
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        files.fault_point("gc.aside")
        if not _older(aside, before) or sha256 in self.named():
            aside.rename(path)
            return False
        aside.unlink()
        files.fault_point("gc.blob")
        return True


def _changed(path: Path) -> float | None:
    """The time at which a regular file was last changed; None for anything else that is there."""
    status = path.lstat()
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _older(path: Path, before: float) -> bool:
    """True if a path is a regular file, not changed since `before`."""
    try:
        changed = _changed(path)
    except FileNotFoundError:
        return False
    return changed is not None and changed <= before


def _blob(sha256: str) -> str:
    return f"{BLOBS}/{reference.check_sha256(sha256)}"


def _events(name: str) -> str:
    return f"names/{reference.check_name(name)}/events"


def _event(name: str, number: int) -> str:
    return f"{_events(name)}/{number:08}.json"


def _parted(files: list[str]) -> tuple[list[int], list[str]]:
    """The numbers of the events among the files of a folder, in order, and the other files."""
    numbers = [int(file[:8]) for file in files if _EVENT.fullmatch(file)]
    return numbers, [file for file in files if not _EVENT.fullmatch(file)]


def _check_digest(found: str, sha256: str) -> None:
    if found != sha256:
        raise ArtifactError(f"sha256: the file has {found}; it was changed")


def _gaps(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of the numbers that are missing between 1 and the last, run by run."""
    for before, number in zip([0, *numbers], numbers, strict=False):
        if number > before + 1:
            yield before + 1, number - 1


_RECORDS: dict[str, tuple[Callable[[bytes, PurePath], object], str]] = {  # {kind: its check, advice on a damaged one}
    "evaluations": (evaluation_records.from_bytes, "delete it, and evaluate again"),
    "signatures": (lambda data, path: _check_digest(hash_of(data).hexdigest(), path.stem), "delete it, and sign again"),
}
