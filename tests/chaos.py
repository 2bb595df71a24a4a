"""Commands that change a disk, run in a child that is killed, meets a full disk, or writes down each of its steps.

A child is forked from this process, so everything is imported already. Another command joins by a line in `COMMANDS`.
"""

import io
import json
import os
import re
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forked
import tiny
import tiny_artifact
from power_cut import Disk

from kvq_calib import checkpoint
from kvq_calib import cli as calibrate_cli
from kvq_runtime import artifact, cli, faults, files, reference, upkeep
from kvq_runtime.local import LocalRegistry

ROOT = Path(__file__).parents[1]
NAME = "tiny-2bit"
BESIDE = {"README.md": b"# card", "error.png": b"png"}
TIMEOUT = 120


@dataclass(frozen=True)
class Command:
    """What is done to a folder.

    before   makes what is there beforehand
    run      does it, and returns an exit code
    """

    before: Callable[[Path], object]
    run: Callable[[Path], int]


def store(folder: Path) -> LocalRegistry:
    return LocalRegistry(folder / "registry")


def _a_model(folder: Path) -> None:
    tiny.save(folder / "model", layers=3)
    tiny.text(folder / "model")


def _calibrate(folder: Path) -> int:
    text = ["--corpus", str(folder / "model" / "corpus.txt"), "--samples", "4", "--seq-len", "128", "--held-out", "1"]
    where = ["--run", str(folder / "runs" / "one"), "--registry", store(folder).url]
    return calibrate_cli.main(["--model", str(folder / "model"), *text, *where, "--quiet", "--json"])


def _a_version(folder: Path) -> None:
    store(folder).publish(NAME, tiny_artifact.data(0), beside=BESIDE)
    store(folder).promote(NAME, "1.0.0")


def _publish(folder: Path) -> int:
    try:
        store(folder).publish(NAME, tiny_artifact.data(1), beside=BESIDE | {"README.md": b"# another"})
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _two_versions(folder: Path) -> None:
    _a_version(folder)
    _publish(folder)


def _kvq(*arguments: str) -> Callable[[Path], int]:
    return lambda folder: cli.main(
        [a.replace("DIR", str(folder)) for a in arguments] + ["--registry", store(folder).url]
    )


def _orphans(folder: Path) -> None:
    _two_versions(folder)
    store(folder).put_blob(b"nobody names it")
    store(folder).put_blob(b"nor this")
    (store(folder).root / "tmp" / ".1-2.tmp").write_bytes(b"half")


COMMANDS = {
    "calibrate": Command(_a_model, _calibrate),
    "publish": Command(lambda folder: None, _publish),
    "publish another": Command(_a_version, _publish),
    "promote": Command(_two_versions, _kvq("promote", f"{NAME}@1.0.1")),
    "pull": Command(_two_versions, _kvq("pull", NAME, "-o", "DIR/out", "--lock", "DIR/kvq.lock")),
    "gc": Command(_orphans, _kvq("gc", "--grace", "0s")),
}


# ---- one child


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (-9: killed), what it printed, its steps, its seconds."""

    code: int
    said: str
    steps: list[list[str]]
    seconds: float


def run(
    command: Command,
    folder: Path,
    fault: str | None = None,
    kill_after: float | None = None,
    limit: int | None = None,
) -> Ended:
    """Run a command in a child.

    fault        as KVQ_FAULT has it
    kill_after   seconds from its first step
    limit        bytes; no file can become longer
    """
    notes = folder.with_name(folder.name + ".notes")
    notes.mkdir(exist_ok=True)
    for old in notes.iterdir():
        old.unlink()
    child = forked.process(_child, command, folder, notes, fault, limit)
    begun = time.perf_counter()
    child.start()
    if kill_after is not None:
        while not (notes / "steps").exists() and child.is_alive():
            time.sleep(0.0005)
        child.join(kill_after)
        child.kill()
    child.join(TIMEOUT)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError(f"the child went on for {TIMEOUT} s, with {fault or kill_after}")
    whole = (notes / "steps").read_text().rpartition("\n")[0].splitlines() if (notes / "steps").exists() else []
    steps = [json.loads(line) for line in whole]
    said = (notes / "said").read_text() if (notes / "said").exists() else ""  # nothing from the killed
    return Ended(child.exitcode, said, steps, time.perf_counter() - begun)


def _child(command: Command, folder: Path, notes: Path, fault: str | None, limit: int | None) -> int:
    sys.stdout = sys.stderr = said = io.StringIO()
    if fault is not None:
        os.environ["KVQ_FAULT"] = fault
    if limit is None:
        _trace(folder, os.open(notes / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    else:  # the notes would be cut short, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return command.run(folder)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        (notes / "said").write_text(said.getvalue())


def _trace(folder: Path, out: int) -> None:
    """Write down every step of this process that changes `folder`, and every fault point, one line each."""

    def note(kind: str, *paths: object) -> None:
        given = [os.fspath(path) for path in paths]  # type: ignore[arg-type]
        if Path(given[0]).name == "lock":  # holds nothing: the system's lock on it is what counts
            return
        if kind == "point" or all(isinstance(path, str) and f"{path}/".startswith(f"{folder}/") for path in given):
            os.write(out, (json.dumps([kind, *given]) + "\n").encode())

    def heard(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], (str, Path)) and args[2] & (os.O_WRONLY | os.O_RDWR):
            note("write", args[0])
        elif event in ("os.rename", "os.link"):
            note("name" if event == "os.rename" else "link", *args[:2])
        elif event in ("os.remove", "os.rmdir"):
            note("remove", args[0])
        elif event == "os.mkdir" and not os.path.lexists(args[0]):
            note("make", args[0])

    fsync, save_file, point = os.fsync, checkpoint.save_file, faults.point

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        note("sync", os.readlink(f"/proc/self/fd/{descriptor}"))

    def saved(tensors: dict, path: Path) -> None:  # not written by Python: no audit event
        note("write", path)
        save_file(tensors, path)

    def passed(name: str) -> None:
        note("point", name)
        point(name)

    os.fsync, checkpoint.save_file, faults.point = synced, saved, passed
    sys.addaudithook(heard)


# ---- what a folder holds


def observe(folder: Path) -> dict:
    """Load everything of the registry and the pulled folder; an error where a version, an event or a file is torn."""
    registry, found = store(folder), {}
    faulty = [finding for finding in upkeep.examine(registry) if finding.level == "fault"]
    assert not faulty, faulty
    for name in registry.names():
        state = registry.state(name)
        for version in state.versions.values():
            artifact.load(registry.fetch(name, version), version.sha256, version.size)
            for entry in version.files.values():
                assert files.digest(registry.blob(entry["sha256"])) == (entry["sha256"], entry["size"])
        found[name] = {v.version: (v.sha256, v.files) for v in state.versions.values()}, state.aliases
    lock = folder / "kvq.lock"
    return {
        "registry": found,
        "pulled": {path.name: files.digest(path) for path in folder.glob("out/[!.]*")},
        "lock": reference.read_lock(lock).sha256 if lock.exists() else None,
    }


def tree(folder: Path) -> set[str]:
    """Every path in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def points_in_the_code() -> list[str]:
    """Every point of the project."""
    sources = [path for package in ("kvq_runtime", "kvq_calib") for path in (ROOT / package).rglob("*.py")]
    calls = re.compile(r'^\s+faults\.point\("([^"]+)"\)', re.MULTILINE)
    return [name for path in sorted(sources) for name in calls.findall(path.read_text())]


class Case:
    """One command with its folder as it is before, and what it does when nobody disturbs it."""

    def __init__(self, name: str, folder: Path):
        self.name, self.command = name, COMMANDS[name]
        self.start = folder / "start"
        self.start.mkdir(parents=True)
        self.command.before(self.start)
        self.before = observe(self.start)
        self.place = folder / "place"  # always the same path: a plan names its model
        self.fresh()
        self.command.run(self.place)  # here, so that every child finds its imports done
        self.fresh()
        self.undisturbed = run(self.command, self.place)
        assert self.undisturbed.code == 0, self.undisturbed.said
        self.after, self.paths = observe(self.place), tree(self.place)
        self.trace = self.undisturbed.steps

    @property
    def passages(self) -> dict[str, int]:
        """How often each point is passed."""
        points = [step[1] for step in self.trace if step[0] == "point"]
        return {name: points.count(name) for name in dict.fromkeys(points)}

    def fresh(self) -> None:
        """Make the folder as it is before the command."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.start, self.place)

    def disturb(self, fault: str | None = None, kill_after: float | None = None, limit: int | None = None) -> Ended:
        """Run it with a fault; then what is there must be whole, and the same command again must finish it."""
        self.fresh()
        first = run(self.command, self.place, fault, kill_after, limit)
        found = observe(self.place)
        assert found["registry"] in (self.before["registry"], self.after["registry"]), "half a change"
        assert found["pulled"].items() <= self.after["pulled"].items() and found["lock"] in (None, self.after["lock"])
        again = run(self.command, self.place)
        assert again.code == 0, again.said
        assert observe(self.place) == self.after
        upkeep.collect(store(self.place), grace=0)
        left, lost = tree(self.place) - self.paths, self.paths - tree(self.place)
        assert not left and not lost, f"left {sorted(left)}, lost {sorted(lost)}"
        Disk().play(first.steps + again.steps)
        return first
