"""Hold files of blocks by name within a budget, in memory or in a folder: the least recently used go first.

`Memory` and `Folder` are shelves, which know nothing of what is in a file. Processes share a folder,
and one budget for all of it.

    ROOT/{set}/about.json              what the blocks of a set are of; {set} is its sha256
    ROOT/{set}/{name}.safetensors      one block
    ROOT/{set}/tmp/                    drafts, on the file system of the blocks

A block is written as a draft and renamed (disk/files.py): a reader sees a whole file or none, and of two writers of one
name the later one stays. Nothing is locked. When a file was last used is its mtime; the oldest go first, over all sets.
Files are 0600 and the folders of sets 0700; a root of another user, or one that others may write to, is refused.
"""

import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SUFFIX = ".safetensors"
SLACK = 16  # a process looks at the folder again when it has written 1/16 of the budget
_DIGEST = "[0-9a-f]" * 64
_log = logging.getLogger(__name__)
GRACE = 600.0  # seconds: a younger draft of another machine may be at work


class Shelf(Protocol):
    """A place for blocks. Raises OSError if the machine fails."""

    def has(self, name: str) -> bool:
        """True if there is a block of this name, which is not checked."""
        ...

    def get(self, name: str, limit: int) -> bytes | None:
        """Its bytes; None: there is none. ArtifactError if it has more than `limit` bytes, or is no file."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep a block, in place of one of this name."""
        ...

    def used(self, names: Sequence[str]) -> None:
        """Note that a chain's first blocks are in use: what is nearer to the beginning is newer."""
        ...

    def drop(self, name: str) -> None:
        """Forget a block."""
        ...


def parse_bytes(budget: str | int, name: str = "budget=") -> int:
    """Bytes of "20GB", "512MiB" or a number. ValueError for anything else, which begins with that text."""
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", str(budget).upper())
    size = int(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else 0
    if size < 1:
        raise ValueError(f'{name}{budget!r}; use a number of bytes, or text such as "20GB" or "512MiB"')
    return size


class Memory:
    """Blocks in this process' memory; threads may share it."""

    def __init__(self, budget: int):
        self.budget, self.size = budget, 0
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        return name in self._held

    def get(self, name: str, limit: int) -> bytes | None:
        return self._held.get(name)

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            self._forget(name)
            while self._held and self.size + len(data) > self.budget:
                self._forget(next(iter(self._held)))
            self._held[name] = data
            self.size += len(data)

    def used(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in reversed(names):
                if name in self._held:
                    self._held.move_to_end(name)

    def drop(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.size -= len(self._held.pop(name, b""))


class Kept(NamedTuple):
    """One file of a block: when it was last used (seconds, as `time.time`), its bytes, and where it is."""

    used: float
    size: int
    path: Path


class Folder:
    """The blocks of one set in a shared folder.

    about    JSON of what the blocks are of;   digest   its sha256, the set's name
    budget   bytes of all blocks of all sets in the folder
    """

    def __init__(self, root: Path, about: dict[str, Any], digest: str, budget: int):
        self.root, self.budget, self._about = root, budget, about
        self.place, self.drafts = root / digest, root / digest / "tmp"
        self._make()
        self._room = 0  # bytes that may be written before the folder is looked at again
        for draft in old_drafts(self.place, GRACE):
            remove(draft)

    def _make(self) -> None:
        """Make what is missing of the folders, and check whose they are."""
        files.make_folder(self.root, 0o700)
        check_owner(self.root)
        for folder in (self.place, self.drafts):
            files.make_folder(folder, 0o700)
            check_owner(folder)
            if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
                folder.chmod(0o700)
        if not (self.place / "about.json").exists():
            files.replace(self.place / "about.json", strict_json.dumps(self._about).encode(), self.drafts, 0o600)
        files.sync(self.place)  # a process may have died between naming a block and this

    def path(self, name: str) -> Path:
        """Return the path of the block of this name, which may not exist."""
        return self.place / f"{name}{SUFFIX}"

    def has(self, name: str) -> bool:
        return os.path.isfile(self.path(name))  # unlike `is_file`, False where a folder cannot be looked into

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            return files.read(self.path(name), limit)
        except NotFound:
            return None

    def put(self, name: str, data: bytes) -> None:
        if len(data) > self._room:
            self._make_room(len(data))
        self._room -= len(data)
        try:
            files.replace(self.path(name), data, self.drafts, 0o600)
        except IsADirectoryError:  # somebody's folder
            self.drop(name)
            files.replace(self.path(name), data, self.drafts, 0o600)
        except FileNotFoundError:
            try:
                self._make()
            except ArtifactError as error:
                raise PermissionError(str(error)) from None
            _log.warning("%s was removed, with what was kept in it, and is made again", self.place)
            files.replace(self.path(name), data, self.drafts, 0o600)

    def used(self, names: Sequence[str]) -> None:
        now = time.time_ns()
        for number, name in enumerate(names):  # of one moment, the block nearer to the beginning is the newer one
            with suppress(OSError):
                os.utime(self.path(name), ns=(now, now - 1000 * number))

    def drop(self, name: str) -> None:
        path = self.path(name)
        with suppress(OSError):  # what cannot be removed is found damaged once more
            if stat.S_ISDIR(path.lstat().st_mode):  # not ours to remove
                path.rename(self.place / f"not-a-block-{secrets.token_hex(8)}")
            else:
                remove(Kept(0.0, path.lstat().st_size, path))

    def _make_room(self, needed: int) -> None:
        """Evict until `needed` bytes fit, and allow this process a share of the rest before it looks again."""
        kept = all_blocks(self.root)
        gone = oldest(kept, self.budget - needed)
        for one in gone:
            remove(one)
        free = self.budget - sum(one.size for one in kept) + sum(one.size for one in gone)
        self._room = max(needed, min(free, needed + self.budget // SLACK))


def blocks(folder: Path) -> Iterator[Kept]:
    """Every block of a set; files of other names, links and folders are none."""
    return _files(folder.glob(f"{_DIGEST}{SUFFIX}"))


def _files(paths: Iterable[Path]) -> Iterator[Kept]:
    """Those that are files, and still there."""
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield Kept(status.st_mtime, status.st_size, path)


def sets(root: Path) -> list[Path]:
    """The folders of sets in a root; links to folders are none."""
    found = sorted(path.parent for path in root.glob(f"{_DIGEST}/about.json"))
    return [folder for folder in found if not folder.is_symlink()]


def all_blocks(root: Path) -> list[Kept]:
    """Every block of every set."""
    return [one for folder in sets(root) for one in blocks(folder)]


def oldest(kept: list[Kept], budget: int) -> list[Kept]:
    """The least recently used of these blocks, without which the others are of no more than `budget` bytes."""
    held, found = sum(one.size for one in kept), []
    for one in sorted(kept):
        if held <= budget:
            break
        found.append(one)
        held -= one.size
    return found


def old_drafts(folder: Path, grace: float) -> list[Kept]:
    """The drafts in a set whose process died here, and those of other machines older than `grace` seconds."""
    return [*_files([] if (folder / "tmp").is_symlink() else files.orphans(folder / "tmp", grace))]


def remove(one: Kept) -> None:
    """Remove a file; another process may be faster."""
    with suppress(FileNotFoundError):
        one.path.unlink()
        files.fault_point("prefix.removed")


def check_owner(root: Path) -> None:
    """Raise ArtifactError unless a folder is this user's, and no other user may write to it."""
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ArtifactError(f"{root}: not a folder, or a link to one; use the folder itself")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ArtifactError(
            f"{root}: others can write to it (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):03o}); "
            f"use a folder of your own: chmod go-w {root}"
        )
