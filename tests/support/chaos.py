"""Disturb commands that change a disk or a Hub: what they leave must be consistent, and a repeat must finish the job.

A command is added by a line in `COMMANDS`; traced.py runs and disturbs it.
"""

import contextlib
import copy
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import hub_client
import huggingface_hub
import pytest
import tiny
import tiny_artifact
import torch
from hub_http import Faults
from hub_server import Hub
from traced import Disk, Finished, run

from kvq_calib.cli import calibrate as calibrate_cli
from kvq_calib.job import prepare
from kvq_calib.report import plots
from kvq_calib.run import run as execution
from kvq_runtime.artifact import artifact
from kvq_runtime.cli import main as cli
from kvq_runtime.disk import files
from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix.folder import all_blocks
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.recipe import preset
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import read_lock

ROOT = Path(__file__).parents[2]
NAME = "tiny-2bit"
CARD = b"---\nlibrary_name: kvq\ntags: [kvq]\n---\n# card\n"
ATTACHMENTS = {"README.md": CARD, "error.png": b"png"}
COMMIT = "(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"
DRAFTS = ("**/.*.tmp", "**/*.incomplete")


@dataclass(frozen=True)
class Command:
    """A command on a folder, and on the Hub at $HF_ENDPOINT.

    before   prepares the folder and the Hub
    run      runs the command, and returns its exit code
    """

    before: Callable[[Path], object]
    run: Callable[[Path], int]


def store(folder: Path) -> LocalRegistry:
    return LocalRegistry(folder / "registry")


def _a_model(folder: Path) -> None:
    tiny.save(folder / "model", layers=2)
    tiny.text(folder / "model")


def _calibrate(folder: Path, *more: str) -> int:
    """A calibration that writes its activations after each layer, and waits for that: the same steps each time."""
    text = ["--corpus", str(folder / "model" / "corpus.txt"), "--samples", "4", "--seq-len", "128", "--held-out", "1"]
    where = ["--run", str(folder / "runs" / "one"), "--registry", store(folder).url]
    with pytest.MonkeyPatch.context() as patch:
        for drawn in ("error_by_layer", "perplexity_by_bits"):  # drawing is half of such a run, and touches no disk
            patch.setattr(plots, drawn, lambda _: b"png")
        patch.setattr(execution, "threading", SimpleNamespace(Thread=AtOnce))
        patch.setattr(prepare, "EVERY", 1e-9)
        return calibrate_cli.main(
            ["--model", str(folder / "model"), *text, *where, "--also", "none", "--quiet", "--json", *more]
        )


class AtOnce(threading.Thread):
    """A thread that is done when it has been started."""

    def start(self) -> None:
        super().start()
        self.join()


def _a_version(folder: Path) -> None:
    version = store(folder).publish(NAME, tiny_artifact.data(0), attachments=ATTACHMENTS)
    store(folder).promote(NAME, version.version)
    about = {"protocol": {}, "environment": {}, "result": {"perplexity": 12.5}}
    store(folder).add_evaluation({"artifact": version.sha256, "corpus": "c" * 64, **about})


def _publish(folder: Path) -> int:
    try:
        store(folder).publish(NAME, tiny_artifact.data(1), attachments=ATTACHMENTS | {"README.md": CARD + b"another\n"})
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
    store(folder).put_blob(b"no event names it")
    store(folder).put_blob(b"nor this")
    (store(folder).root / "tmp" / ".1-2.tmp").write_bytes(b"half")


def _pushed(folder: Path) -> None:
    """Two versions, here and on the Hub; the first is production there too."""
    _two_versions(folder)
    assert _kvq("copy", NAME, "hf://org")(folder) == 0


def _orphans_on_the_hub(folder: Path) -> None:
    _pushed(folder)
    for path in ("versions/9.0.0/kvq.safetensors", "evaluations/" + "0" * 64 + "/x.json"):
        huggingface_hub.HfApi(endpoint=os.environ["HF_ENDPOINT"]).upload_file(
            path_or_fileobj=b"no event names it", path_in_repo=path, repo_id=f"org/{NAME}"
        )


def _prefixes(folder: Path) -> PrefixBlocks:
    """A store with room for one prefix of three blocks, and no second one."""
    recipe, shape = preset("kivi-2bit"), Geometry(layers=1, kv_heads=4, head_size=64)
    return PrefixBlocks(folder / "prefixes", recipe, shape, model="m", dtype=torch.float32, budget=96000)


def _tokens(first: int) -> list[int]:
    return [first + n % 50 for n in range(384)]


def _keep(folder: Path, first: int) -> None:
    rows = [torch.linspace(first, first + 1, 384 * 256).view(384, 256)]
    assert _prefixes(folder).put(_tokens(first), rows, rows) == 384


def _keep_another(folder: Path) -> int:
    """Keep a prefix, which evicts one; drafts of killed processes go."""
    try:
        _keep(folder, 60)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


PULL = ("-o", "DIR/out", "--lock", "DIR/kvq.lock")
COMMANDS = {
    "calibrate": Command(_a_model, _calibrate),
    "calibrate by files": Command(_a_model, lambda folder: _calibrate(folder, "--checkpoint-every", "0s")),
    "publish": Command(lambda folder: None, _publish),
    "publish another": Command(_a_version, _publish),
    "promote": Command(_two_versions, _kvq("promote", f"{NAME}@1.0.1")),
    "pull": Command(_two_versions, _kvq("pull", NAME, *PULL)),
    "gc": Command(_orphans, _kvq("gc", "--grace", "0s")),
    "keep a prefix": Command(lambda folder: _keep(folder, 5), _keep_another),
    "push": Command(_a_version, _kvq("copy", f"{NAME}@1.0.0", "hf://org")),
    "promote on a Hub": Command(_pushed, _kvq("promote", f"hf://org/{NAME}@1.0.1")),
    "pull from a Hub": Command(_pushed, _kvq("pull", f"hf://org/{NAME}", *PULL)),
    "gc of a Hub": Command(_orphans_on_the_hub, _kvq("gc", "--registry", "hf://org", "--grace", "0s")),
}
ON_A_HUB = ("push", "promote on a Hub", "pull from a Hub", "gc of a Hub")


# ---- the state that a command leaves


def observe(folder: Path) -> dict:
    """Load everything in the registry and the pulled folder; raises an error if anything is damaged."""
    registry, names = store(folder), {}
    faulty = [finding for finding in registry.examine() if finding.level == "fault"]
    assert not faulty, faulty
    for name in registry.names():
        state = registry.state(name)
        for version in state.versions.values():
            artifact.load(registry.fetch(name, version), version.sha256, version.size)
            for entry in version.files.values():
                assert files.digest(registry.blob(entry["sha256"])) == (entry["sha256"], entry["size"])
        names[name] = {v.version: (v.sha256, v.files) for v in state.versions.values()}, state.aliases
    lock, prefixes = folder / "kvq.lock", folder / "prefixes"
    for first in (5, 60) if prefixes.exists() else ():
        kept = _prefixes(folder)
        assert 128 * len(kept.load(_tokens(first))) == kept.longest(_tokens(first))
    return {
        "prefixes": {one.path.name for one in all_blocks(prefixes)},
        "registry": names,
        "pulled": {path.name: files.digest(path) for path in folder.glob("out/[!.]*")},
        "lock": read_lock(lock).sha256 if lock.exists() else None,
    }


def observe_hub(hub: Hub) -> dict:
    """Load everything on the Hub, as another machine would; raises an error if a version or a tag is wrong."""
    registry, names = HubRegistry(hub.org), {}
    faulty = [finding for finding in registry.examine() if finding.level == "fault"]
    assert not faulty, faulty
    for name in registry.names():
        state = registry.state(name)
        for version in state.versions.values():
            artifact.load(registry.fetch(name, version), version.sha256, version.size)
            registry.attachments(name, version)  # which compares their digests
        versions = {v.version: (v.sha256, v.files) for v in state.versions.values()}
        names[name] = versions, state.aliases, sorted(hub_client.checked_versions(hub, name))
    return names


def names_on(hub: Hub) -> set[tuple[str, str]]:
    """Every path on main and every tag, with its repository."""
    return {(repo.id, name) for repo in hub.repos.values() for name in [*repo.at("main").tree, *repo.tags]}


def tree(folder: Path) -> set[str]:
    """Every path in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def points_in_the_code() -> list[str]:
    """Every fault point of the project."""
    sources = [path for package in ("kvq_runtime", "kvq_calib") for path in (ROOT / package).rglob("*.py")]
    calls = re.compile(r'^\s+(?:files\.)?fault_point\("([^"]+)"\)', re.MULTILINE)
    return [name for path in sorted(sources) for name in calls.findall(path.read_text())]


@contextlib.contextmanager
def using(hub: Hub, cache: Path) -> Iterator[None]:
    """Let this process' client talk to a Hub, with this cache."""
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        hub_client.use(patch, hub.url, cache)
        yield
        huggingface_hub.close_session()


class Case:
    """A command with its initial folder and Hub, and the result and steps of an undisturbed run."""

    def __init__(self, name: str, folder: Path, hub: Hub):
        self.name, self.command, self.hub = name, COMMANDS[name], hub
        self.start = folder / "start"
        self.start.mkdir(parents=True)
        self.place = folder / "place"  # always the same path: a plan names its model
        self.cache = folder / "cache"
        self.kept = {}, {}
        self.fresh()
        with using(hub, self.cache):
            self.command.before(self.start)
        self.kept = copy.deepcopy((hub.repos, hub.lfs))
        self.fresh()
        self.before = self.observe(self.start)
        self.work(self.place)  # in this process, so that its imports are done in every child
        self.fresh()
        self.undisturbed = run(self.work, self.place, hub)
        assert self.undisturbed.code == 0, self.undisturbed.output
        # patterns: a commit has another id every time
        self.requests = list(dict.fromkeys(re.sub(COMMIT, COMMIT, re.escape(request.line)) for request in hub.requests))
        self.after, self.paths, self.names = self.observe(self.place), tree(self.place), names_on(hub)
        self.trace = self.undisturbed.steps

    @property
    def passages(self) -> dict[str, int]:
        """How often each point is passed."""
        points = [step[1] for step in self.trace if step[0] == "point"]
        return {name: points.count(name) for name in dict.fromkeys(points)}

    def work(self, folder: Path) -> int:
        """Run the command."""
        with using(self.hub, self.cache):
            return self.command.run(folder)

    def observe(self, folder: Path) -> dict:
        """The state of the folder and the Hub."""
        cache = self.cache.with_name("another-machine")
        shutil.rmtree(cache, ignore_errors=True)
        with using(self.hub, cache):
            return observe(folder) | {"hub": observe_hub(self.hub)}

    def fresh(self) -> None:
        """Restore the initial folder and Hub, with an empty cache."""
        for folder in (self.place, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.start, self.place)
        self.hub.repos, self.hub.lfs = copy.deepcopy(self.kept)
        self.hub.faults = Faults()
        with using(self.hub, self.cache):
            pass  # creates the client's own files, which no limit on the command may prevent

    def disturb(self, fault: str | None = None, kill_after: float | None = None, limit: int | None = None) -> Finished:
        """Run the command with a fault, then `recover`."""
        self.fresh()
        return self.recover(run(self.work, self.place, self.hub, fault, kill_after, limit))

    def trouble(self, request: str, kind: str, times: int, **more) -> tuple[Finished, int]:
        """Run the command while the Hub fails at a request, then `recover`; returns how it ended, and the failures.

        request   a pattern: METHOD /path
        """
        self.fresh()
        faults = self.hub.faults
        faults.add(f"^{request}$", kind, times, **more)
        first = run(self.work, self.place, self.hub)
        self.hub.faults = Faults()
        return self.recover(first), len(faults.happened)

    def recover(self, first: Finished) -> Finished:
        """Check that a disturbed command left a consistent state, and that a repeat finishes it without garbage."""
        state = self.observe(self.place)
        for what in ("registry", "hub"):
            assert state[what] in (self.before[what], self.after[what]), "half a change"
        assert state["pulled"].items() <= self.after["pulled"].items() and state["lock"] in (None, self.after["lock"])
        again = run(self.work, self.place, self.hub)
        assert again.code == 0, again.output
        assert self.observe(self.place) == self.after
        differ = names_on(self.hub) ^ self.names
        assert not differ, f"on the Hub, left or lost {sorted(differ)}"
        store(self.place).collect(grace=0)
        with using(self.hub, self.cache):
            HubRegistry(self.hub.org).collect(grace=0)
        left, lost = tree(self.place) - self.paths, self.paths - tree(self.place)
        assert not left and not lost, f"left {sorted(left)}, lost {sorted(lost)}"
        drafts = [path for pattern in DRAFTS for path in self.cache.glob(pattern)]
        assert not drafts, f"left {drafts}"
        Disk().play(first.steps + again.steps)
        return first
