"""Commands that change a disk or a Hub, disturbed; what they leave is whole, and the same command again finishes it.

Another command joins by a line in `COMMANDS`; how it is run and disturbed is in traced.py.
"""

import contextlib
import copy
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hub_client
import huggingface_hub
import pytest
import tiny
import tiny_artifact
from hub_faults import Faults
from hub_server import Hub
from power_cut import Disk
from traced import Ended, run

from kvq_calib import cli as calibrate_cli
from kvq_runtime import artifact, cli, files, reference
from kvq_runtime.registries import hub_upkeep, upkeep
from kvq_runtime.registries.hub import HubRegistry
from kvq_runtime.registries.local import LocalRegistry

ROOT = Path(__file__).parents[1]
NAME = "tiny-2bit"
CARD = b"---\nlibrary_name: kvq\ntags: [kvq]\n---\n# card\n"
BESIDE = {"README.md": CARD, "error.png": b"png"}
COMMIT = "(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"
DRAFTS = ("**/.*.tmp", "**/*.incomplete")


@dataclass(frozen=True)
class Command:
    """What is done to a folder, and to the Hub that HF_ENDPOINT names.

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
    made = store(folder).publish(NAME, tiny_artifact.data(0), beside=BESIDE)
    store(folder).promote(NAME, made.version)
    about = {"protocol": {}, "environment": {}, "result": {"perplexity": 12.5}}
    store(folder).add_evaluation({"artifact": made.sha256, "corpus": "c" * 64, **about})


def _publish(folder: Path) -> int:
    try:
        store(folder).publish(NAME, tiny_artifact.data(1), beside=BESIDE | {"README.md": CARD + b"another\n"})
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


def _pushed(folder: Path) -> None:
    """Two versions, here and on the Hub; the first is production there too."""
    _two_versions(folder)
    assert _kvq("copy", "--all", NAME, "hf://org")(folder) == 0


def _orphans_on_the_hub(folder: Path) -> None:
    _pushed(folder)
    for path in ("versions/9.0.0/kvq.safetensors", "evaluations/" + "0" * 64 + "/x.json"):
        huggingface_hub.HfApi(endpoint=os.environ["HF_ENDPOINT"]).upload_file(
            path_or_fileobj=b"nobody names it", path_in_repo=path, repo_id=f"org/{NAME}"
        )


PULL = ("-o", "DIR/out", "--lock", "DIR/kvq.lock")
COMMANDS = {
    "calibrate": Command(_a_model, _calibrate),
    "publish": Command(lambda folder: None, _publish),
    "publish another": Command(_a_version, _publish),
    "promote": Command(_two_versions, _kvq("promote", f"{NAME}@1.0.1")),
    "pull": Command(_two_versions, _kvq("pull", NAME, *PULL)),
    "gc": Command(_orphans, _kvq("gc", "--grace", "0s")),
    "push": Command(_a_version, _kvq("push", f"{NAME}@1.0.0", "hf://org")),
    "promote on a Hub": Command(_pushed, _kvq("promote", f"hf://org/{NAME}@1.0.1")),
    "pull from a Hub": Command(_pushed, _kvq("pull", f"hf://org/{NAME}", *PULL)),
    "gc of a Hub": Command(_orphans_on_the_hub, _kvq("gc", "hf://org", "--grace", "0s")),
}
ON_A_HUB = ("push", "promote on a Hub", "pull from a Hub", "gc of a Hub")


# ---- what there is


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


def observe_hub(hub: Hub) -> dict:
    """Load everything of the Hub, as another machine would; an error where a version or a tag is wrong."""
    registry, found = HubRegistry(hub.org), {}
    faulty = [finding for finding in hub_upkeep.examine(registry) if finding.level == "fault"]
    assert not faulty, faulty
    for name in registry.names():
        state = registry.state(name)
        for version in state.versions.values():
            artifact.load(registry.fetch(name, version), version.sha256, version.size)
            registry.beside(name, version)  # which compares their digests
        versions = {v.version: (v.sha256, v.files) for v in state.versions.values()}
        found[name] = versions, state.aliases, sorted(hub_client.whole(hub, name))
    return found


def names_on(hub: Hub) -> set[tuple[str, str]]:
    """Every path on main and every tag, with its repository."""
    return {(repo.id, name) for repo in hub.repos.values() for name in [*repo.at("main").tree, *repo.tags]}


def tree(folder: Path) -> set[str]:
    """Every path in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def points_in_the_code() -> list[str]:
    """Every point of the project."""
    sources = [path for package in ("kvq_runtime", "kvq_calib") for path in (ROOT / package).rglob("*.py")]
    calls = re.compile(r'^\s+faults\.point\("([^"]+)"\)', re.MULTILINE)
    return [name for path in sorted(sources) for name in calls.findall(path.read_text())]


@contextlib.contextmanager
def using(hub: Hub, cache: Path) -> Iterator[None]:
    """Let this process' client talk to a Hub, with such a cache."""
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        hub_client.use(patch, hub.url, cache)
        yield
        huggingface_hub.close_session()


class Case:
    """One command with its folder and its Hub as they are before, and what it does when nobody disturbs it."""

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
        self.work(self.place)  # here, so that every child finds its imports done
        self.fresh()
        self.undisturbed = run(self.work, self.place, hub)
        assert self.undisturbed.code == 0, self.undisturbed.said
        # patterns: a commit has another id every time
        self.requests = list(dict.fromkeys(re.sub(COMMIT, COMMIT, re.escape(one.line)) for one in hub.requests))
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
        """What the folder and the Hub hold."""
        cache = self.cache.with_name("another-machine")
        shutil.rmtree(cache, ignore_errors=True)
        with using(self.hub, cache):
            return observe(folder) | {"hub": observe_hub(self.hub)}

    def fresh(self) -> None:
        """Make folder and Hub as they are before the command, with an empty cache."""
        for folder in (self.place, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.start, self.place)
        self.hub.repos, self.hub.lfs = copy.deepcopy(self.kept)
        self.hub.faults = Faults()
        with using(self.hub, self.cache):
            pass  # what the client keeps for itself is there, whatever the command may write

    def disturb(self, fault: str | None = None, kill_after: float | None = None, limit: int | None = None) -> Ended:
        """Run it with a fault; then what is there must be whole, and the same command again must finish it."""
        self.fresh()
        return self.recover(run(self.work, self.place, self.hub, fault, kill_after, limit))

    def trouble(self, request: str, kind: str, times: int, **more) -> tuple[Ended, int]:
        """Run it while the Hub fails at a request: how it ended, and how often the Hub did.

        request   a pattern: METHOD /path
        """
        self.fresh()
        faults = self.hub.faults
        faults.add(f"^{request}$", kind, times, **more)
        first = run(self.work, self.place, self.hub)
        self.hub.faults = Faults()
        return self.recover(first), len(faults.happened)

    def recover(self, first: Ended) -> Ended:
        """Check what a disturbed command left, run it again, and check that it has finished."""
        found = self.observe(self.place)
        for what in ("registry", "hub"):
            assert found[what] in (self.before[what], self.after[what]), "half a change"
        assert found["pulled"].items() <= self.after["pulled"].items() and found["lock"] in (None, self.after["lock"])
        again = run(self.work, self.place, self.hub)
        assert again.code == 0, again.said
        assert self.observe(self.place) == self.after
        differ = names_on(self.hub) ^ self.names
        assert not differ, f"on the Hub, left or lost {sorted(differ)}"
        upkeep.collect(store(self.place), grace=0)
        with using(self.hub, self.cache):
            hub_upkeep.collect(HubRegistry(self.hub.org), grace=0)
        left, lost = tree(self.place) - self.paths, self.paths - tree(self.place)
        assert not left and not lost, f"left {sorted(left)}, lost {sorted(lost)}"
        drafts = [path for pattern in DRAFTS for path in self.cache.glob(pattern)]
        assert not drafts, f"left {drafts}"
        Disk().play(first.steps + again.steps)
        return first
