"""Publish, find and move versions of artifacts in a folder that many processes share without a lock.

    blobs/sha256/<hex>                          artifacts, cards and plots, read-only, named by their digest
    names/<name>/events/00000042.json           what happened to a name, one file a change: see events.py
    evaluations/<sha256>/<sha256 of file>.json  what was measured of an artifact later, never changed
    tmp/                                        files not finished yet

A change is prepared from the events there are, written to tmp/, fsynced, and claimed by a hard link to the next number.
Taken already: read again, check again, try again. A blob is on the disk before an event names it.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from hashlib import sha256 as hash_of
from pathlib import Path
from typing import Any

from kvq_runtime import artifact, events, files, reference, versions
from kvq_runtime import evaluations as records
from kvq_runtime.artifact import Artifact
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.events import Change, Event, Promote, Publish, Rollback, State, Version, Yank
from kvq_runtime.reference import PRODUCTION

TRIES = 200
_EVENT_LIMIT = 1 << 16


def _same(state: State, sha256: str) -> Version | None:
    return next((version for version in state.versions.values() if version.sha256 == sha256), None)


class LocalRegistry:
    """A registry in a folder; it is created by the first publish."""

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self._tmp = self.root / "tmp"

    @property
    def url(self) -> str:
        """Its address, file:///..."""
        return self.root.as_uri()

    def blob(self, sha256: str) -> Path:
        """Where a blob of this digest is, or would be."""
        return self.root / "blobs" / "sha256" / reference.check_sha256(sha256)

    def events_folder(self, name: str) -> Path:
        """Where a name's events are."""
        return self.root / "names" / reference.check_name(name) / "events"

    def names(self) -> list[str]:
        """Every name with at least one event."""
        folders = sorted(folder.parent for folder in self.root.glob("names/*/events") if any(folder.glob("*.json")))
        return [folder.name for folder in folders if reference.is_name(folder.name)]

    def event(self, name: str, number: int) -> Event:
        """One event of a name; ArtifactError names the file that is no event."""
        path = self.events_folder(name) / f"{number:08}.json"
        try:
            return events.from_bytes(files.read(path, _EVENT_LIMIT), number, name)
        except NotFound:
            text = f"{path}: event: missing, though later ones are there; kvq doctor says what to do"
            raise ArtifactError(text) from None
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {str(error).removeprefix(f'{path}: ')}; kvq doctor says what to do") from None

    def state(self, name: str) -> State:
        """Versions, aliases and history of a name; empty if nothing was published under it."""
        state, folder = State(name), self.events_folder(name)
        # a listing may miss a file that is new; whatever comes before a file that it shows is there
        last = max((int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdecimal()), default=0)
        for number in range(1, last + 1):
            event = self.event(name, number)
            try:
                state = state.apply(event)
            except ArtifactError as error:
                path = folder / f"{number:08}.json"
                raise ArtifactError(f"{path}: event: contradicts those before it: {error}") from None
        return state

    def existing(self, name: str) -> State:
        """The state of a name that must be there; NotFound lists what is."""
        state = self.state(name)
        if not state.events:
            known = self.names()
            there = f"there are {', '.join(known[:8])}" if known else "it is empty; kvq-calibrate publishes artifacts"
            raise NotFound(f"no artifact {name} in {self.url}; {there}")
        return state

    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change: `decide` sees the present state, and again whenever another change came first.

        decide   returns the change, or None if nothing is left to do; raises Conflict to give up
        Returns the state with the change in it.
        """
        for _ in range(TRIES):
            state = self.state(name)
            change = decide(state)
            if change is None:
                return state
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            event = Event(len(state.events) + 1, name, at, change)
            after = state.apply(event)
            folder = self.events_folder(name)
            for needed in (folder, self._tmp):
                files.make_folder(needed)
            if files.claim(folder / f"{event.number:08}.json", event.to_bytes(), self._tmp):
                return after
        raise Conflict(f"{name}: {TRIES} other changes came first; try again")

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their digest. One that is there is written again: mended, and young to gc."""
        sha256 = hash_of(data).hexdigest()
        path = self.blob(sha256)
        for needed in (path.parent, self._tmp):
            files.make_folder(needed)
        files.replace(path, data, self._tmp)
        return sha256

    def publish(
        self, name: str, data: bytes, version: str | None = None, beside: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish an artifact's bytes; bytes that are there already are the version they are, and nothing changes.

        version   its number, or None for the next: PATCH for a recalibration, MINOR for other settings or another
                  corpus, MAJOR for another schema or model
        beside    {"README.md": ..., plots}: files stored with the version
        Raises ArtifactError for bytes that do not load, Conflict if the number is taken.
        """
        reference.check_name(name)
        if version is not None:
            reference.check_version(version)
        beside = {reference.check_file(file): content for file, content in (beside or {}).items()}
        fitted = artifact.from_bytes(data)
        sha256 = hash_of(data).hexdigest()
        self.state(name)  # a damaged history is an error before anything is written
        self.put_blob(data)
        entries = {file: {"sha256": self.put_blob(body), "size": len(body)} for file, body in beside.items()}

        def decide(state: State) -> Change | None:
            if _same(state, sha256):
                return None
            return Publish(version or self._next_version(state, fitted), sha256, len(data), entries)

        found = _same(self.change(name, decide), sha256)
        for content in (data, *beside.values()):  # gc may have taken an old orphan between put_blob and the event
            if not self.blob(hash_of(content).hexdigest()).exists():
                self.put_blob(content)
        assert found is not None, "the change that was claimed is in the state"
        return found

    def _next_version(self, state: State, new: Artifact) -> str:
        highest = versions.highest(state)
        if highest is None:
            return versions.FIRST
        try:
            old = artifact.load(self.blob(highest.sha256), highest.sha256, highest.size)
        except ArtifactError as error:
            text = f"{error}; the next version follows from {highest.version}: name yours with --version"
            raise ArtifactError(text) from None
        return versions.following(highest.version, old, new)

    def promote(self, name: str, version: str, alias: str = PRODUCTION, expect: str | None = None) -> State:
        """Point an alias to a version.

        expect   the version the alias must have now ("none" for a new alias); None is whatever it has when this is
                 called. If the alias moved meanwhile: Conflict, and nothing changes.
        """
        reference.check_version(version)
        before = self.existing(name).at(reference.check_alias(alias)) if expect is None else expect
        before = None if before == "none" else before

        def decide(state: State) -> Change | None:
            if state.at(alias) == version:
                return None
            self._check_unmoved(state, alias, before)
            return Promote(alias, version)

        return self.change(name, decide)

    def rollback(self, name: str, alias: str = PRODUCTION) -> State:
        """Point an alias to the version it had before."""
        before = self.existing(name).at(reference.check_alias(alias))

        def decide(state: State) -> Change | None:
            self._check_unmoved(state, alias, before)
            return Rollback(alias, state.before(alias))

        return self.change(name, decide)

    def _check_unmoved(self, state: State, alias: str, before: str | None) -> None:
        now = state.at(alias)
        if now != before:
            raise Conflict(
                f"{state.name}@{alias} is {now or 'none'}, {before or 'none'} was expected: somebody moved it; "
                f"look at kvq history {state.name}, then say it again with --expect {now or 'none'}"
            )

    def yank(self, name: str, version: str, reason: str) -> State:
        """Withdraw a version: it stays, and is chosen only by number or digest."""
        reference.check_version(version)
        events.check_reason(reason)
        self.existing(name)
        return self.change(name, lambda state: Yank(version, reason))

    def fetch(self, version: Version) -> Path:
        """The file of a version; loading it checks digest and size."""
        return self.blob(version.sha256)

    def add_evaluation(self, record: Mapping[str, Any]) -> str:
        """Store what was measured of an artifact, as `evaluations` says; returns the record's digest."""
        data = records.to_bytes(record)
        sha256 = hash_of(data).hexdigest()
        folder = self._evaluations(record["artifact"])
        for needed in (folder, self._tmp):
            files.make_folder(needed)
        files.claim(folder / f"{sha256}.json", data, self._tmp)
        return sha256

    def evaluations(self, sha256: str) -> list[dict[str, Any]]:
        """Every evaluation record of an artifact, ordered by the record's digest."""
        return [records.read(path) for path in sorted(self._evaluations(sha256).glob("*.json"))]

    def _evaluations(self, sha256: str) -> Path:
        return self.root / "evaluations" / reference.check_sha256(sha256)
