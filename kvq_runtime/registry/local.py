"""Keep a registry as files in a folder that many processes share without a lock.

    blobs/sha256/<hex>                          artifacts, cards and plots, named by their digest
    names/<name>/events/00000042.json           the changes of a name, one file each: see events.py
    evaluations/<sha256>/<sha256 of file>.json  measurements of an artifact, added later, never changed
    signatures/<sha256>/<sha256 of file>.json   signatures of it
    tmp/                                        unfinished files

A change is decided from the present events, and claims the next number, which one process gets. If another process took
it: read, decide and claim again. A file is written to tmp/, fsynced, and gets its name by a rename, or, where the name
must be new, by a hard link. It is read-only from then on. A blob is on the disk before an event names it.

Only drafts of dead processes are ever removed. A publish that was killed may leave a blob that no event names; the same
publish uses it again.
"""

import os
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import events, reference
from kvq_runtime.registry.events import Event, State, Version
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.registry import MAX_RECORD, Registry

BLOBS = "blobs/sha256"
_EVENT_LIMIT = 1 << 16  # bytes
_EVENT = re.compile(r"(?!0{8})[0-9]{8}\.json")
_RESTORE = "; restore it from a backup; later events are kept"


class LocalRegistry(Registry):
    """A registry in a folder, `root`, which the first publish creates."""

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self._tmp = self.root / "tmp"

    @property
    def url(self) -> str:
        """The address, file:///..."""
        return self.root.as_uri()

    # ---- reading

    def blob(self, sha256: str) -> Path:
        """Return the path of the blob with this digest."""
        return self.root / BLOBS / reference.check_sha256(sha256)

    def events_folder(self, name: str) -> Path:
        """Return the path of a name's events."""
        return self.root / "names" / reference.check_name(name) / "events"

    def names(self) -> list[str]:
        """List every name with events, and those whose events cannot be read."""
        names = []
        for name in filter(reference.is_name, self._list(self.root / "names")):
            try:
                names += [name] if self._numbers(name) else []
            except (ArtifactError, PermissionError):
                names.append(name)
        return names

    def _list(self, folder: Path) -> list[str]:
        """List the names in a folder, in order; none if it does not exist, ArtifactError if it is something else."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            broken = [path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()]
            if broken:
                raise ArtifactError(f"{broken[0]}: a link that leads nowhere; mount or restore its target") from None
            return []
        except NotADirectoryError:
            raise ArtifactError(f"{folder}: not a folder; move it away, and name a folder, which may be new") from None

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers of a name's events, in order; ArtifactError for another .json file among them."""
        folder = self.events_folder(name)
        event_files = [file for file in self._list(folder) if file.endswith(".json")]
        for file in event_files:
            if not _EVENT.fullmatch(file):  # it may be a renamed event, the only one that names some blob
                raise ArtifactError(f"{folder / file}: event: not its name; use eight digits, as in 00000042.json")
        return [int(file[:8]) for file in event_files]

    def state(self, name: str) -> State:
        """Return versions, aliases and history of a name; empty without events."""
        state, folder = State(name), self.events_folder(name)
        # a listing may miss a new file, but every event before a listed one exists
        for number in range(1, max(self._numbers(name), default=0) + 1):
            path = folder / f"{number:08}.json"
            try:
                state.add(events.from_bytes(files.read(path, _EVENT_LIMIT), number, name))
            except ArtifactError as error:
                missing = isinstance(error, NotFound) and not path.exists()
                text = "event: missing, though later ones exist" if missing else str(error)
                raise ArtifactError(f"{path}: {text.removeprefix(f'{path}: ')}{_RESTORE}") from None
        return state

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """Return the path of a file's blob."""
        return self.blob(version.content[file][0])

    def list_records(self, name: str, folder: str) -> Iterator[tuple[PurePath, bytes]]:
        """Yield path and content of the .json files of a folder, in the order of their names."""
        for file in self._list(self.root / folder):
            if file.endswith(".json"):
                path = self.root / folder / file
                yield path, files.read(path, MAX_RECORD)

    def check_writable(self) -> None:
        """Raise RuntimeError if the folder or its nearest existing parent is read-only, ArtifactError for a file."""
        nearest = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if not nearest.is_dir():
            raise ArtifactError(f"the registry {self.root}: {nearest} is a file; name a folder, which may be new")
        if not os.access(nearest, os.W_OK):
            raise RuntimeError(f"the registry {self.root} cannot be written to; choose another with --registry")

    # ---- changing

    def write(self, state: State, event: Event, content: Mapping[str, bytes]) -> bool:
        """Write the files of a publish, then claim the event's number; False if another process has it."""
        for data in content.values():
            self.put_blob(data)
            files.fault_point("publish.blob")
        path = self.events_folder(event.name) / f"{event.number:08}.json"
        claimed = self._claim(path, event.to_bytes())
        files.fault_point("publish.event")
        return claimed

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their digest, and return it."""
        sha256 = hash_of(data).hexdigest()
        self._make_folders(self.root / BLOBS)
        files.replace(self.blob(sha256), data, self._tmp)
        return sha256

    def mend(self, state: State, content: Mapping[str, bytes]) -> None:
        """Sync the events, whose writer may have died before, and write the blobs of published files again."""
        if state.events:
            files.sync(self.events_folder(state.name))
        published = {digest for version in state.versions.values() for digest, _ in version.content.values()}
        for data in content.values():
            if hash_of(data).hexdigest() in published:
                self.put_blob(data)

    def add(self, name: str, path: str, data: bytes) -> None:
        """Add an immutable file; nothing happens if it exists."""
        self._claim(self.root / path, data)

    def _claim(self, path: Path, data: bytes) -> bool:
        self._make_folders(path.parent)
        return files.claim(path, data, self._tmp)

    def _make_folders(self, folder: Path) -> None:
        files.make_folder(folder)
        files.make_folder(self._tmp)
