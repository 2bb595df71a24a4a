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
from collections.abc import Mapping
from functools import partial
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.artifact import stated
from kvq_runtime.disk import faults, files
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import evaluations, events, reference
from kvq_runtime.registry.events import Event, State, Version
from kvq_runtime.registry.place import Head
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.registry import Registry

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

    def look(self, name: str) -> Head:
        """Versions, aliases and history of a name; empty if nothing was published under it."""
        folder = self.events_folder(name)
        # a listing may miss a new file, but every event before a listed one exists
        last = max((int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdecimal()), default=0)
        place = lambda number: str(folder / f"{number:08}.json")  # noqa: E731
        return Head(events.numbered(name, last, partial(self.event, name), place))

    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Claim the next number; None if another process took it."""
        event, folder = after.events[-1], self.events_folder(after.name)
        for path in (folder, self._tmp):
            files.make_folder(path)
        return Head(after) if files.claim(folder / f"{event.number:08}.json", event.to_bytes(), self._tmp) else None

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

    def store(self, name: str, content: Mapping[str, bytes]) -> None:
        """Put every file into its blob, unless the history of the name is damaged."""
        self.look(name)
        for data in content.values():
            self.put_blob(data)
            faults.point("publish.blob")

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Sync the events, whose process may have died before; write blobs again that gc took before their event."""
        if version is None:
            files.sync(self.events_folder(name))
            return
        faults.point("publish.event")
        for data in (content or {}).values():
            if not self.blob(hash_of(data).hexdigest()).exists():
                self.put_blob(data)

    def check_writable(self) -> None:
        """Raise RuntimeError if the folder, or its nearest existing parent, is read-only."""
        nearest = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if not os.access(nearest, os.W_OK):
            raise RuntimeError(f"the registry {self.root} cannot be written to; choose another with --registry")

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """The path of a file's blob."""
        return self.blob(version.file(file)[0])

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from its file's header."""
        return stated.summary(stated.describe(self.blob(version.sha256)))

    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a file that never changes; the name is not needed here."""
        target = self.root / path
        for folder in (target.parent, self._tmp):
            files.make_folder(folder)
        files.claim(target, data, self._tmp)

    def listed(self, name: str, folder: str) -> list[tuple[PurePath, bytes]]:
        """(path, content) of every .json file of a folder, by path."""
        return [(path, files.read(path, evaluations.LIMIT)) for path in sorted((self.root / folder).glob("*.json"))]
