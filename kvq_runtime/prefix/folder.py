"""Keep files of blocks in a folder that many processes share, within one budget for all of it.

    ROOT/{set}/about.json              what the blocks of a set are of; {set} is its sha256
    ROOT/{set}/{name}.safetensors      one block
    ROOT/{set}/tmp/                    drafts, on the file system of the blocks

A block is written as a draft and renamed (disk/files.py): a reader sees a whole file or none, and of two writers of one
name the later one stays. Nothing is locked. When a file was last used is its mtime; the oldest go first, over all sets.
Files are 0600 and the folders of sets 0700; a root of another user, or one that others may write to, is refused.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvq_runtime.disk import faults, files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound

SUFFIX = ".safetensors"
SLACK = 16  # a process looks at the folder again when it has written 1/16 of the budget
_DIGEST = "[0-9a-f]" * 64
GRACE = 600.0  # seconds: a younger draft may be of a process that this one cannot see


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
        self.root, self.budget = root, budget
        files.make_folder(root, 0o700)
        check_owner(root)
        self.place, self.drafts = root / digest, root / digest / "tmp"
        for folder in (self.place, self.drafts):
            files.make_folder(folder, 0o700)
            check_private(folder)
        if not (self.place / "about.json").exists():
            files.replace(self.place / "about.json", strict_json.dumps(about).encode(), self.drafts, 0o600)
        files.sync(self.place)  # a process may have died between naming a block and this
        self._room = 0  # bytes that may be written before the folder is looked at again
        for draft in old_drafts(self.place, GRACE):
            remove(draft)

    def path(self, name: str) -> Path:
        """Return the path of the block of this name, which may not exist."""
        return self.place / f"{name}{SUFFIX}"

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

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
    for path in folder.glob(f"{_DIGEST}{SUFFIX}"):
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
    """The drafts of dead processes in a set that are older than `grace` seconds."""
    found = []
    for path in () if (folder / "tmp").is_symlink() else files.orphans(folder / "tmp"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_mtime <= time.time() - grace:
                found.append(Kept(status.st_mtime, status.st_size, path))
    return found


def remove(one: Kept) -> None:
    """Remove a file; another process may be faster."""
    with suppress(FileNotFoundError):
        one.path.unlink()
        faults.point("prefix.removed")


def read_about(folder: Path) -> dict[str, Any]:
    """Return the description of a set of blocks; ArtifactError if the file is damaged."""
    path = folder / "about.json"
    about = strict_json.loads(files.read(path, 1 << 22), str(path))
    if not isinstance(about, dict):
        raise ArtifactError(f"{path}: expected an object; remove the folder {folder}")
    return about


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


def check_private(folder: Path) -> None:
    """Make a folder of blocks its owner's alone."""
    check_owner(folder)
    if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
        folder.chmod(0o700)
