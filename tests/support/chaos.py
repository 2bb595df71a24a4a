"""Disturb commands that change a disk or a Hub: kill them, fill the disk, cut the power, let the Hub fail.

What they leave must be consistent, and a repeat must finish the job. A command is added by a line in `COMMANDS`; it
runs in a child that is forked from this process, so that everything is imported already.
"""

import contextlib
import copy
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import forked
import hub_client
import huggingface_hub
import pytest
import tiny
import tiny_artifact
from hub_server import Faults, Hub
from local_store import damage
from patience import PATIENCE

from kvq_calib.cli import calibrate as calibrate_cli
from kvq_calib.job import prepare
from kvq_calib.report import plots
from kvq_calib.run import checkpoint
from kvq_calib.run import run as execution
from kvq_runtime.cli import main as cli
from kvq_runtime.disk import files
from kvq_runtime.registry.hub import HubRegistry
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import read_lock

NAME = "tiny-2bit"
COMMIT = "(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"


# ---- commands --------------------------------------------------------------------------------------------------------


def store(folder: Path) -> LocalRegistry:
    return LocalRegistry(folder / "registry")


def _a_model(folder: Path) -> None:
    tiny.save(folder / "model", layers=2)
    tiny.text(folder / "model")


def _calibrate(folder: Path) -> int:
    """A calibration that writes its activations after each layer."""
    text = ["--corpus", str(folder / "model" / "corpus.txt"), "--samples", "4", "--seq-len", "128", "--held-out", "1"]
    where = ["--run", str(folder / "runs" / "one"), "--registry", store(folder).url]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "png", lambda _: b"png")  # drawing is half of such a run, and touches no disk
        patch.setattr(execution, "SHARE", 1.0)
        patch.setattr(prepare, "EVERY", 1e-9)
        return calibrate_cli.main(["--model", str(folder / "model"), *text, *where, "--quiet", "--json"])


def _publish(folder: Path, seed: int = 1) -> int:
    try:
        store(folder).publish(NAME, tiny_artifact.data(seed), attachments=hub_client.CARD)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _two_versions(folder: Path) -> None:
    _publish(folder, 0)
    store(folder).promote(NAME, "1.0.0", force=True)
    _publish(folder)


def _kvq(*arguments: str) -> Callable[[Path], int]:
    return lambda folder: cli.main(
        [a.replace("DIR", str(folder)) for a in arguments] + ["--registry", store(folder).url]
    )


def _pushed(folder: Path) -> None:
    _two_versions(folder)
    assert _kvq("copy", NAME, "hf://org")(folder) == 0


PULL = ("-o", "DIR/out", "--lock", "DIR/kvq.lock")
COMMANDS: dict[str, tuple[Callable[[Path], object], Callable[[Path], int]]] = {  # {name: (preparation, command)}
    "calibrate": (_a_model, _calibrate),
    "publish": (lambda folder: None, _publish),
    "promote": (_two_versions, _kvq("promote", f"{NAME}@1.0.1", "--force")),
    "pull": (_two_versions, _kvq("pull", NAME, *PULL)),
    "push": (_two_versions, _kvq("copy", f"{NAME}@1.0.0", "hf://org")),
    "pull from a Hub": (_pushed, _kvq("pull", f"hf://org/{NAME}", *PULL)),
}


# ---- a child ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """How a child ended: exit code (-9: killed), output, steps [kind, path, ...] that changed its folder, seconds."""

    code: int
    output: str
    steps: list[list[str]]
    seconds: float


def run(work: Callable[[Path], int], folder: Path, fault: str = "", kill_after: float | None = None) -> Finished:
    """Run a command in a child, with $KVQ_FAULT, or killed `kill_after` seconds after its first step."""
    notes = folder.with_name(f"{folder.name}.notes")
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    child, begun = forked.process(_child, work, folder, notes, fault), time.perf_counter()
    child.start()
    if kill_after is not None:
        while not (notes / "steps").exists() and child.is_alive():
            time.sleep(0.0005)
        child.join(kill_after)
        child.kill()
    child.join(PATIENCE)
    assert child.exitcode is not None, f"the child still ran after {PATIENCE} s"
    lines = (notes / "steps").read_text().rpartition("\n")[0].splitlines() if (notes / "steps").exists() else []
    output = (notes / "output").read_text() if (notes / "output").exists() else ""
    return Finished(child.exitcode, output, [json.loads(line) for line in lines], time.perf_counter() - begun)


def _child(work: Callable[[Path], int], folder: Path, notes: Path, fault: str) -> int:
    with (notes / "output").open("w", buffering=1) as output:
        sys.stdout = sys.stderr = output
        os.environ["KVQ_FAULT"] = fault or "none:0"
        files._passed.clear()  # what this worker passed before is inherited
        _trace(folder, os.open(notes / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        try:
            return work(folder)
        except BaseException:
            traceback.print_exc()
            return 70
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _trace(folder: Path, out: int) -> None:
    """Record every step of this process that changes `folder`, and every fault point that it passes."""

    def note(kind: str, *paths: object) -> None:
        names = [os.fspath(path) for path in paths]  # type: ignore[arg-type]
        inside = all(isinstance(path, str) and f"{path}/".startswith(f"{folder}/") for path in names)
        if kind == "point" or (inside and Path(names[0]).name != "lock"):  # a lock is empty
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
    os.fsync = lambda one: (fsync(one), note("sync", os.readlink(f"/proc/self/fd/{one}")))[0]
    checkpoint.save_file = lambda tensors, path: (note("write", path), save_file(tensors, path))[1]  # no audit event
    files.fault_point = lambda name: (note("point", name), point(name))[1]
    sys.addaudithook(heard)


class Disk:
    """A disk that keeps only what was synced, and checks the order: write, sync, name, sync the folder, next name.

    dirty     files whose content is not synced
    entries   names whose folder is not synced
    """

    def __init__(self) -> None:
        self.dirty: set[str] = set()
        self.entries: set[str] = set()

    def play(self, steps: list[list[str]]) -> None:
        """Replay every step; at the end everything but drafts must be synced."""
        for kind, *paths in steps:
            if kind != "point":
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
        inside = {path for path in self.dirty | self.entries if path.startswith(f"{old}/")}
        assert old not in self.dirty and not inside, f"{old} is named before it is synced: {inside}"
        waiting = {entry for entry in self.entries if not _is_draft(entry) and not _is_draft(new)}
        if "/events/" not in new and "/layer-" not in new:  # names without references need only the folders above them
            waiting &= {str(parent) for parent in Path(new).parents}
        waiting = {entry for entry in waiting if "/kept-" not in entry}  # runs go on without them
        assert not waiting, f"{new} is named while {waiting} may be lost"
        self.entries.add(new)


def _is_draft(path: str) -> bool:
    return any(part.endswith((".tmp", ".partial")) for part in Path(path).parts)


# ---- states ----------------------------------------------------------------------------------------------------------


def _versions(registry: LocalRegistry | HubRegistry) -> dict:
    """Load everything in a registry; raises an error if anything is damaged."""
    assert damage(registry) == {}
    states = [registry.state(name) for name in registry.names()]
    return {s.name: ({v.version: (v.sha256, v.files) for v in s.versions.values()}, s.aliases) for s in states}


def observe(folder: Path, hub: Hub) -> dict:
    """The state of a folder and a Hub, all of it whole."""
    lock = folder / "kvq.lock"
    for repo in hub.repos:
        hub_client.whole_versions(hub, repo.partition("/")[2])
    return {
        "registry": _versions(store(folder)),
        "hub": _versions(HubRegistry(hub.org)),
        "pulled": {path.name: files.digest(path) for path in folder.glob("out/[!.]*")},
        "lock": read_lock(lock).sha256 if lock.exists() else None,
    }


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


class Case:
    """A command with its initial folder and Hub, and the steps and result of an undisturbed run."""

    def __init__(self, name: str, folder: Path, hub: Hub):
        self.name, self.hub = name, hub
        prepare_it, self.command = COMMANDS[name]
        self.start, self.place, self.home = folder / "start", folder / "place", folder / "home"
        self.start.mkdir(parents=True)
        self.kept: tuple[dict, dict] = {}, {}
        self.fresh()
        with self.using():
            prepare_it(self.start)
        self.kept = copy.deepcopy((hub.repos, hub.lfs))
        self.fresh()
        self.before = self.observe(self.start)
        self.work(self.place)  # in this process, so that its imports are done in every child
        self.fresh()
        self.hub.requests.clear()
        self.undisturbed = run(self.work, self.place)
        assert self.undisturbed.code == 0, self.undisturbed.output
        # patterns: a commit has another id every time
        self.requests = list(dict.fromkeys(re.sub(COMMIT, COMMIT, re.escape(request.line)) for request in hub.requests))
        self.after, self.paths = self.observe(self.place), tree(self.place)

    def faults(self) -> list[str]:
        """Every passage of a fault point, `point:n`; of a calibration, which is slow, the first of each point."""
        points = [step[1] for step in self.undisturbed.steps if step[0] == "point"]
        every = {name: points.count(name) for name in points}
        most = 1 if self.name == "calibrate" else 99
        return [f"{point}:{n}" for point, count in every.items() for n in range(1, min(count, most) + 1)]

    @contextlib.contextmanager
    def using(self, home: str = "home") -> Iterator[None]:
        """Let this process' client talk to the Hub, with this cache."""
        self.home.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            hub_client.use(patch, self.hub.url, self.home)
            patch.setenv("KVQ_HOME", str(self.home.with_name(home)))
            yield
            huggingface_hub.close_session()

    def work(self, folder: Path) -> int:
        with self.using():
            return self.command(folder)

    def observe(self, folder: Path) -> dict:
        """The state as another machine sees it."""
        self.hub.rest()
        shutil.rmtree(self.home.with_name("another"), ignore_errors=True)
        with self.using("another"):
            return observe(folder, self.hub)

    def fresh(self) -> None:
        """Restore the initial folder and Hub, with an empty cache."""
        for folder in (self.place, self.home):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.start, self.place)
        self.hub.repos, self.hub.lfs = copy.deepcopy(self.kept)
        self.hub.faults = Faults()

    def disturb(self, fault: str = "", kill_after: float | None = None, **trouble) -> Finished:
        """Run the command with a fault, or while the Hub fails, then check what it left and that a repeat finishes."""
        self.fresh()
        if trouble:
            self.hub.faults.add(**trouble)
        first = run(self.work, self.place, fault, kill_after)
        happened, self.hub.faults = self.hub.faults.happened, Faults()
        assert happened or not trouble, "the fault did not strike"
        state = self.observe(self.place)
        for what in ("registry", "hub"):
            assert state[what] in (self.before[what], self.after[what]), "half a change"
        assert state["pulled"].items() <= self.after["pulled"].items() and state["lock"] in (None, self.after["lock"])
        again = run(self.work, self.place)
        assert again.code == 0, again.output
        assert self.observe(self.place) == self.after
        for draft in files.orphans(store(self.place).root / "tmp"):
            draft.unlink()
        left, lost = tree(self.place) - self.paths, self.paths - tree(self.place)
        assert not left and not lost, f"left {sorted(left)}, lost {sorted(lost)}"
        Disk().play(first.steps + again.steps)
        return first
