"""Hold the files of blocks by name in a folder within a budget: the least recently used go first.

Processes share a folder, and one budget for all of it.

    ROOT/{set}/{name}.safetensors      one block; {set} is a sha256 of everything that decides how tokens become bytes
    ROOT/{set}/tmp/                    drafts, on the file system of the blocks

A block is written as a draft and renamed (disk/files.py): a reader sees a whole file or none, and the later of two
writers of one name wins. There are no locks. The mtime of a file is the time of its last use. Files are 0600 and the
folders of sets 0700; a root of another user, or one that others may write to, is refused. The root may be removed at
any time: it is made again.
"""

import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SUFFIX = ".safetensors"
SLACK = 16  # a process looks at the folder again when it has written 1/16 of the budget
SKEW = 60.0  # seconds by which clocks of machines that share a folder may differ
_DIGEST = "[0-9a-f]" * 64
_log = logging.getLogger(__name__)


def parse_budget(size: str | int) -> int:
    """Parse "20GB", "512MiB" or a number of bytes. Raises ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", str(size).upper())
    count = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if count < 1:
        raise ValueError(f'budget={size!r}; use a number of bytes, or text such as "20GB" or "512MiB"')
    return count


class StoredBlock(NamedTuple):
    """A block on disk: time of last use in seconds since the epoch, size in bytes, path."""

    used: float
    size: int
    path: Path


class Folder:
    """The blocks of one set in a shared folder.

    digest   the set's name;   budget   bytes of all sets
    """

    def __init__(self, root: Path, digest: str, budget: int):
        self.root, self.budget = root, budget
        self.blocks, self.drafts = root / digest, root / digest / "tmp"
        self._make()
        self._room = 0  # bytes that may be written before the folder is looked at again

    def _make(self) -> None:
        """Make missing folders, and check their owners."""
        for folder in (self.root, self.blocks, self.drafts):
            files.make_folder(folder, 0o700)
            _check_owner(folder)
            if folder != self.root and stat.S_IMODE(folder.lstat().st_mode) != 0o700:
                folder.chmod(0o700)
        files.sync(self.blocks)  # a process may have died between naming a block and this

    def path(self, name: str) -> Path:
        """Return the path of the block of this name."""
        return self.blocks / f"{name}{SUFFIX}"

    def has(self, name: str) -> bool:
        """Return whether there is a block of this name, unchecked."""
        return os.path.isfile(self.path(name))  # unlike `Path.is_file`, False where a folder cannot be looked into

    def put(self, name: str, data: bytes) -> None:
        """Keep a block, replacing one of this name. Raises OSError if the disk refuses."""
        if len(data) > self._room:
            self._make_room(len(data))
        self._room -= len(data)
        try:
            files.replace(self.path(name), data, self.drafts, 0o600)
        except FileNotFoundError:
            self._make()
            _log.warning("%s was removed, and is made again", self.blocks)
            files.replace(self.path(name), data, self.drafts, 0o600)

    def touch(self, names: Sequence[str]) -> None:
        """Mark the first blocks of a chain as used, beginnings as the newest."""
        now = time.time_ns()
        for number, name in enumerate(names):
            with suppress(OSError):
                os.utime(self.path(name), ns=(now, now - 1000 * number))

    def _make_room(self, needed: int) -> None:
        """Evict until `needed` bytes fit, and allow this process a share of the rest before it looks again."""
        blocks = all_blocks(self.root)
        free = self.budget - sum(block.size for block in blocks)
        for block in blocks:
            if free >= needed:
                break
            with suppress(FileNotFoundError):  # another process was faster
                block.path.unlink()
                files.fault_point("prefix.removed")
            free += block.size
        self._room = max(needed, min(free, needed + self.budget // SLACK))


def all_blocks(root: Path) -> list[StoredBlock]:
    """Return every block of every set, the least recently used first; links and folders are none.

    A time to come, of a clock that was set back, counts as the oldest: the blocks would stay until then.
    """
    blocks, now = [], time.time() + SKEW
    for path in root.glob(f"{_DIGEST}/{_DIGEST}{SUFFIX}"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and not path.parent.is_symlink():
                used = status.st_mtime if status.st_mtime <= now else 0.0
                blocks.append(StoredBlock(used, status.st_size, path))
    return sorted(blocks)


def _check_owner(folder: Path) -> None:
    """Raise ArtifactError unless a folder is this user's, and no other user may write to it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ArtifactError(f"{folder}: not a folder, or a link to one; use the folder itself")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ArtifactError(
            f"{folder}: others can write to it (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):03o}); "
            f"use a folder of your own: chmod go-w {folder}"
        )
