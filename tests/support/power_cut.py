"""What a power cut would leave: the steps of a command, played on a disk that keeps only what was synced.

A step is [kind, path, ...] as `traced` writes it down: write, sync, make (a folder), link and name (old, new), remove,
ask, a request that changes a Hub, and point, a fault point.
"""

import os
from pathlib import Path


class Disk:
    """Follow the steps of a command on a disk that keeps only what was synced, and check their order.

    dirty     files whose bytes may be lost
    entries   names that may be lost: nobody synced their folder since
    """

    def __init__(self) -> None:
        self.dirty: set[str] = set()
        self.entries: set[str] = set()

    def play(self, steps: list[list[str]]) -> None:
        """Every step in turn; in the end all that is left must last."""
        for kind, *paths in steps:
            if kind not in ("point", "ask"):
                getattr(self, kind)(*paths)
        lost = {path for path in self.dirty | self.entries if not _is_draft(path)}
        assert not lost, f"a power cut would take {sorted(lost)}"

    def write(self, path: str) -> None:
        self.dirty.add(path)
        self.entries.add(path)

    def sync(self, path: str) -> None:
        self.dirty.discard(path)
        self.entries = {entry for entry in self.entries if os.path.dirname(entry) != path}

    def make(self, path: str) -> None:
        self.remove(path)
        self.entries.add(path)

    def remove(self, path: str) -> None:
        for known in (self.dirty, self.entries):
            known -= {entry for entry in known if entry == path or entry.startswith(f"{path}/")}

    def name(self, old: str, new: str) -> None:
        self.link(old, new)
        self.remove(old)

    def link(self, old: str, new: str) -> None:
        """Written → synced → named → folder synced → the next name."""
        inside = {path for path in self.dirty | self.entries if path.startswith(f"{old}/")}
        assert old not in self.dirty and not inside, f"{old} is named before it is synced: {inside}"
        waiting = {entry for entry in self.entries if not _is_draft(entry) and not _is_draft(new)}
        if "/events/" not in new and "/layer-" not in new:  # what refers to nothing needs only the folders above it
            waiting &= {str(parent) for parent in Path(new).parents}
        assert not waiting, f"{new} is named while {waiting} may be lost"
        self.entries.add(new)


def _is_draft(path: str) -> bool:
    """Whether it has a temporary name, or is in a folder that has."""
    return any(part.endswith((".tmp", ".partial")) for part in Path(path).parts)


def gaps(steps: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """Steps that follow each other with no point in between.

    A sync of what is synced already is no step; uploads of large files to a Hub, side by side, are one.
    """
    found, last, changed = [], None, set()
    for step in steps:
        kind, path = step[0], step[-1]
        if (kind == "sync" and path not in changed) or (kind == "ask" and "PUT" in path and last and last[0] == "ask"):
            continue
        if kind == "sync":
            changed.discard(path)
        elif kind not in ("point", "ask"):
            changed |= {path, os.path.dirname(path)}
        if last is not None and kind != "point" and last[0] != "point":
            found.append((last, step))
        last = step
    return found
