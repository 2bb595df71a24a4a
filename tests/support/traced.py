"""Run a command in a child process that is killed, gets a full disk, or records each of its steps; and replay these on
a disk that keeps only what was synced: a power cut.

A step is [kind, path, ...]: write, sync, make (a folder), link and name (old, new), remove, ask (a request that changes
a Hub), and point (a fault point). A child is forked from this process, so everything is imported already.
"""

import io
import json
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forked
from hub_server import Hub, Request
from patience import PATIENCE

from kvq_calib.run import checkpoint
from kvq_runtime.disk import files

CHANGES = re.compile(r"PUT /lfs|POST .*(repos/create|/(commit|tag)/[^/]+)$")  # requests that change a Hub


@dataclass(frozen=True)
class Finished:
    """How a child ended: exit code (-9: killed), printed output, recorded steps, and seconds."""

    code: int
    output: str
    steps: list[list[str]]
    seconds: float


class RecordedRequests(list[Request]):
    """The requests to a Hub; those that change it are also recorded as steps of the command."""

    def __init__(self, steps: Path):
        super().__init__()
        self._steps = steps

    def append(self, request: Request) -> None:
        super().append(request)
        if CHANGES.match(request.line):
            with self._steps.open("a") as steps:
                steps.write(json.dumps(["ask", request.line]) + "\n")


def run(
    work: Callable[[Path], int],
    folder: Path,
    hub: Hub,
    fault: str | None = None,
    kill_after: float | None = None,
    limit: int | None = None,
) -> Finished:
    """Run a command in a child.

    fault        value of $KVQ_FAULT
    kill_after   seconds from its first step
    limit        largest size of a file, in bytes
    """
    notes = folder.with_name(folder.name + ".notes")
    notes.mkdir(exist_ok=True)
    for old in notes.iterdir():
        old.unlink()
    hub.rest()
    hub.requests = RecordedRequests(notes / "steps")
    child = forked.process(_child, work, folder, notes, fault, limit)
    begun = time.perf_counter()
    child.start()
    if kill_after is not None:
        while not (notes / "steps").exists() and child.is_alive():
            time.sleep(0.0005)
        child.join(kill_after)
        child.kill()
    child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError(f"the child still ran after {PATIENCE} s, with {fault or kill_after}")
    hub.rest()
    whole = (notes / "steps").read_text().rpartition("\n")[0].splitlines() if (notes / "steps").exists() else []
    steps = [json.loads(line) for line in whole]
    return Finished(child.exitcode, (notes / "output").read_text(), steps, time.perf_counter() - begun)


def _child(work: Callable[[Path], int], folder: Path, notes: Path, fault: str | None, limit: int | None) -> int:
    # a limit would also truncate the notes: no steps are recorded then, and the output is written at the end
    output = io.StringIO() if limit is not None else (notes / "output").open("w", buffering=1)
    sys.stdout = sys.stderr = output
    if fault is not None:
        os.environ["KVQ_FAULT"] = fault
        files._passed.clear()  # what tests of this worker passed before is inherited
    if limit is None:
        _trace(folder, os.open(notes / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return work(folder)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        if isinstance(output, io.StringIO):
            (notes / "output").write_text(output.getvalue())
        output.close()


def _trace(folder: Path, out: int) -> None:
    """Record every step of this process that changes `folder`, and every fault point it passes, one line each."""

    def note(kind: str, *paths: object) -> None:
        names = [os.fspath(path) for path in paths]  # type: ignore[arg-type]
        if Path(names[0]).name == "lock":  # empty: only the system's lock on it matters
            return
        if kind == "point" or all(isinstance(path, str) and f"{path}/".startswith(f"{folder}/") for path in names):
            os.write(out, (json.dumps([kind, *names]) + "\n").encode())

    def heard(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], (str, Path)) and args[2] & (os.O_WRONLY | os.O_RDWR):
            note("write", args[0])
        elif event in ("os.rename", "os.link"):
            note("name" if event == "os.rename" else "link", *args[:2])
        elif event in ("os.remove", "os.rmdir"):
            note("remove", args[0])
        elif event == "os.mkdir" and not os.path.lexists(args[0]):
            note("make", args[0])

    fsync, save_file, point = os.fsync, checkpoint.save_file, files.fault_point

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        note("sync", os.readlink(f"/proc/self/fd/{descriptor}"))

    def saved(tensors: dict, path: Path) -> None:  # written by Rust: no audit event
        note("write", path)
        save_file(tensors, path)

    def passed(name: str) -> None:
        note("point", name)
        point(name)

    os.fsync, checkpoint.save_file, files.fault_point = synced, saved, passed
    sys.addaudithook(heard)


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
