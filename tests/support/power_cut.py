"""Simulate a power cut: replay the steps of a command on a disk that keeps only what was synced.

A step is [kind, path, ...] as `traced` records it: write, sync, make (a folder), link and name (old, new), remove,
ask (a request that changes a Hub), and point (a fault point).
"""

import os
from pathlib import Path


class Disk:
    """A disk that keeps only what was synced; checks the order of steps.

    dirty     files whose content is not synced
    entries   names whose folder is not synced
    """

    def __init__(self) -> None:
        self.dirty: set[str] = set()
        self.entries: set[str] = set()

    def play(self, steps: list[list[str]]) -> None:
        """Replay every step; at the end everything but drafts must be synced."""
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
        """Check the order: write, sync, name, sync the folder, next name."""
        inside = {path for path in self.dirty | self.entries if path.startswith(f"{old}/")}
        assert old not in self.dirty and not inside, f"{old} is named before it is synced: {inside}"
        waiting = {entry for entry in self.entries if not _is_draft(entry) and not _is_draft(new)}
        if "/events/" not in new and "/layer-" not in new:  # names without references need only the folders above them
            waiting &= {str(parent) for parent in Path(new).parents}
        if "/layer-" in new:  # a run goes on without what was kept of it behind the work
            waiting = {entry for entry in waiting if "/kept-" not in entry}
        assert not waiting, f"{new} is named while {waiting} may be lost"
        self.entries.add(new)


def _is_draft(path: str) -> bool:
    """Whether a path, or a folder above it, has a temporary name."""
    return any(part.endswith((".tmp", ".partial")) for part in Path(path).parts)


def gaps(steps: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """Pairs of consecutive steps without a fault point between them.

    A sync that changes nothing is no step; parallel uploads of large files to a Hub are one.
    """
    pairs, last, changed = [], None, set()
    for step in steps:
        kind, path = step[0], step[-1]
        if (kind == "sync" and path not in changed) or (kind == "ask" and "PUT" in path and last and last[0] == "ask"):
            continue
        if kind == "sync":
            changed.discard(path)
        elif kind not in ("point", "ask"):
            changed |= {path, os.path.dirname(path)}
        if last is not None and kind != "point" and last[0] != "point":
            pairs.append((last, step))
        last = step
    return pairs
