"""Hold files of blocks by name, in memory, within a budget: the least recently used go first.

`Memory` here and `Folder` (folder.py) have the methods of `Shelf`; a shelf knows nothing of what is in a file.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


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
