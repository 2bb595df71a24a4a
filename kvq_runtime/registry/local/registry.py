"""Publish, find and move versions of artifacts in a folder that many processes share without a lock.

    blobs/sha256/<hex>                          artifacts, cards and plots, read-only, named by their digest
    names/<name>/events/00000042.json           what happened to a name, one file a change: see events.py
    evaluations/<sha256>/<sha256 of file>.json  what was measured of an artifact later, never changed
    signatures/<sha256>/<sha256 of file>.json   who vouches for it
    tmp/                                        files not finished yet

A change is prepared from the events there are, written to tmp/, fsynced, and claimed by a hard link to the next number.
Taken already: read again, check again, try again. A blob is on the disk before an event names it.
"""

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime import artifact, describe, faults, files, reference
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registries import changes, evaluations, events
from kvq_runtime.registries.changes import Kind, Registry
from kvq_runtime.registries.events import Change, Event, State, Version

TRIES = 200
_EVENT_LIMIT = 1 << 16


class LocalRegistry(Registry):
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

    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change: claim the next number, or decide again."""
        for _ in range(TRIES):
            state = self.state(name)
            change = decide(state)
            if change is None:
                files.sync(self.events_folder(name))  # whoever made the change may have died before
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
        """Publish: blobs first, then the event that names them."""
        reference.check_name(name)
        beside = beside or {}
        _, decide = changes.publication(self, data, version, beside)
        self.state(name)  # a damaged history is an error before anything is written
        for content in (data, *beside.values()):
            self.put_blob(content)
            faults.point("publish.blob")
        found = changes.same(self.change(name, decide), hash_of(data).hexdigest())
        faults.point("publish.event")
        for content in (data, *beside.values()):  # gc may have taken an old orphan between put_blob and the event
            if not self.blob(hash_of(content).hexdigest()).exists():
                self.put_blob(content)
        assert found is not None, "the change that was claimed is in the state"
        return found

    def check_writable(self) -> None:
        """Look at the folder, or at the nearest one above it that is there."""
        near = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if not os.access(near, os.W_OK):
            raise RuntimeError(f"the registry {self.root} cannot be written to; choose another with --registry")

    def fetch(self, name: str, version: Version) -> Path:
        """The blob."""
        return self.blob(version.sha256)

    def beside(self, name: str, version: Version) -> dict[str, bytes]:
        """The blobs of the files beside a version."""
        found = {}
        for file, entry in version.files.items():
            path = self.blob(entry["sha256"])
            found[file] = files.read(path, entry["size"])
            digest = hash_of(found[file]).hexdigest()
            if digest != entry["sha256"]:
                raise ArtifactError(f"{path}: sha256: the file has {digest}; kvq doctor says what to do")
        return found

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """What the file's header says."""
        return describe.summary(artifact.describe(self.blob(version.sha256)))

    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str = "") -> str:
        """Store a record; the name does not matter here."""
        digest, folder = hash_of(data).hexdigest(), self._records(kind, sha256)
        for needed in (folder, self._tmp):
            files.make_folder(needed)
        files.claim(folder / f"{digest}.json", data, self._tmp)
        return digest

    def records(self, kind: Kind, sha256: str, name: str = "") -> list[tuple[PurePath, bytes]]:
        """Read the records of an artifact."""
        paths = sorted(self._records(kind, sha256).glob("*.json"))
        return [(path, files.read(path, evaluations.LIMIT)) for path in paths]

    def _records(self, kind: Kind, sha256: str) -> Path:
        return self.root / kind / reference.check_sha256(sha256)
