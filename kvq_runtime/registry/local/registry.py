"""Publish, find and move versions of artifacts in a folder that many processes share without a lock.

    blobs/sha256/<hex>                          artifacts, cards and plots, read-only, named by their digest
    names/<name>/events/00000042.json           the changes of a name, one file each: see events.py
    evaluations/<sha256>/<sha256 of file>.json  measurements of an artifact, added later, never changed
    signatures/<sha256>/<sha256 of file>.json   signatures of it
    tmp/                                        unfinished files

A change is decided from the present events, written to tmp/, fsynced, and claimed by a hard link to the next number. If
another process took that number: read, decide and claim again. A blob is on the disk before an event names it.
"""

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.artifact import stated
from kvq_runtime.disk import faults, files
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import evaluations, events, reference
from kvq_runtime.registry.events import Change, Event, State, Version
from kvq_runtime.registry.registry import Kind, Registry, prepare_publish

TRIES = 200
_EVENT_LIMIT = 1 << 16


class LocalRegistry(Registry):
    """A registry in a folder, `root`, which the first publish creates."""

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self._tmp = self.root / "tmp"

    @property
    def url(self) -> str:
        """Its address, file:///..."""
        return self.root.as_uri()

    def blob(self, sha256: str) -> Path:
        """The path of the blob with this digest, whether it exists or not."""
        return self.root / "blobs" / "sha256" / reference.check_sha256(sha256)

    def events_folder(self, name: str) -> Path:
        """The folder of a name's events, whether it exists or not."""
        return self.root / "names" / reference.check_name(name) / "events"

    def names(self) -> list[str]:
        """Every name with at least one event."""
        folders = sorted(folder.parent for folder in self.root.glob("names/*/events") if any(folder.glob("*.json")))
        return [folder.name for folder in folders if reference.is_name(folder.name)]

    def event(self, name: str, number: int) -> Event:
        """One event of a name; raises ArtifactError naming the file if it is missing or malformed."""
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
        fold, folder = events.Fold(State(name)), self.events_folder(name)
        # a listing may miss a new file, but every event before a listed one exists
        last = max((int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdecimal()), default=0)
        for number in range(1, last + 1):
            event = self.event(name, number)
            try:
                fold.add(event)
            except ArtifactError as error:
                path = folder / f"{number:08}.json"
                raise ArtifactError(f"{path}: event: contradicts the events before it: {error}") from None
        return fold.state()

    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change: claim the next number, or decide again if another process took it."""
        for _ in range(TRIES):
            state = self.state(name)
            change = decide(state)
            if change is None:
                files.sync(self.events_folder(name))  # its process may have died before syncing it
                return state
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            event = Event(len(state.events) + 1, name, at, change)
            after = state.apply(event)
            folder = self.events_folder(name)
            for path in (folder, self._tmp):
                files.make_folder(path)
            if files.claim(folder / f"{event.number:08}.json", event.to_bytes(), self._tmp):
                return after
        raise Conflict(f"{name}: {TRIES} other changes came first; try again")

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their digest, and return it.

        An existing blob is rewritten: that repairs it, and resets its age for gc.
        """
        sha256 = hash_of(data).hexdigest()
        path = self.blob(sha256)
        for folder in (path.parent, self._tmp):
            files.make_folder(folder)
        files.replace(path, data, self._tmp)
        return sha256

    def publish(
        self, name: str, data: bytes, version: str | None = None, attachments: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish: blobs first, then the event that names them."""
        reference.check_name(name)
        attachments = attachments or {}
        _, decide = prepare_publish(self, data, version, attachments)
        self.state(name)  # raises for a damaged history, before anything is written
        for content in (data, *attachments.values()):
            self.put_blob(content)
            faults.point("publish.blob")
        published = self.change(name, decide).with_digest(hash_of(data).hexdigest())
        faults.point("publish.event")
        for content in (data, *attachments.values()):  # gc may have removed an old blob between put_blob and the event
            if not self.blob(hash_of(content).hexdigest()).exists():
                self.put_blob(content)
        assert published is not None, "the change that was claimed is in the state"
        return published

    def check_writable(self) -> None:
        """Raise RuntimeError if the folder, or its nearest existing parent, is read-only."""
        nearest = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if not os.access(nearest, os.W_OK):
            raise RuntimeError(f"the registry {self.root} cannot be written to; choose another with --registry")

    def fetch(self, name: str, version: Version) -> Path:
        """The path of a version's blob; loading it checks digest and size."""
        return self.blob(version.sha256)

    def attachments(self, name: str, version: Version) -> dict[str, bytes]:
        """The files published with a version, by name, their digests checked."""
        contents = {}
        for file, entry in version.files.items():
            path = self.blob(entry["sha256"])
            contents[file] = files.read(path, entry["size"])
            digest = hash_of(contents[file]).hexdigest()
            if digest != entry["sha256"]:
                raise ArtifactError(f"{path}: sha256: the file has {digest}; kvq doctor says what to do")
        return contents

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from its file's header."""
        return stated.summary(stated.describe(self.blob(version.sha256)))

    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str = "") -> str:
        """Store a record; returns its digest. `name` is not needed here."""
        digest, folder = hash_of(data).hexdigest(), self._records(kind, sha256)
        for path in (folder, self._tmp):
            files.make_folder(path)
        files.claim(folder / f"{digest}.json", data, self._tmp)
        return digest

    def records(self, kind: Kind, sha256: str, name: str = "") -> list[tuple[PurePath, bytes]]:
        """(path, content) of every record of an artifact."""
        paths = sorted(self._records(kind, sha256).glob("*.json"))
        return [(path, files.read(path, evaluations.LIMIT)) for path in paths]

    def _records(self, kind: Kind, sha256: str) -> Path:
        return self.root / kind / reference.check_sha256(sha256)
