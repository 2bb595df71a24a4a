"""Whoever reads a registry in a folder while it is written finds it whole, wherever the writer stands still.

The writer stands still at each of its fault points, one between any two of its steps, and is read there.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_artifact as tiny
from hub_client import CARD
from local_store import NAME, three

from kvq_runtime.artifact import artifact
from kvq_runtime.cli import main as cli
from kvq_runtime.disk import files
from kvq_runtime.registry import resolve
from kvq_runtime.registry.copy import copy_version
from kvq_runtime.registry.local import LocalRegistry


def read(root: Path) -> list[str]:
    """Everything that a reader may ask for, each file checked; the versions and aliases there are."""
    store, found = LocalRegistry(root), []
    for name in store.names():
        state = store.state(name)
        assert [event.number for event in state.events] == list(range(1, len(state.events) + 1))
        for version in state.versions.values():
            loaded = resolve.load_artifact(f"{name}@{version.version}", store.url)
            assert artifact.to_bytes(loaded) in DATA
            assert store.attachments(name, version).keys() == version.files.keys()
            store.evaluations(version.sha256)
            assert store.about(name, version)["recipe"] == "tiny"
        found += [f"{name} {version}" for version in state.versions] + [f"{a} {state.at(a)}" for a in state.aliases]
    assert not [finding for finding in store.examine() if finding.level == "fault"]
    return found


DATA = [tiny.data(seed) for seed in range(4)]


@pytest.fixture
def source(tmp_path) -> LocalRegistry:
    """Three versions, a card, a promoted one, a yanked one, and an evaluation."""
    store = three(LocalRegistry(tmp_path / "source"))
    version = store.publish(NAME, DATA[3], attachments=CARD)
    store.promote(NAME, "1.0.1")
    store.promote(NAME, version.version)
    store.yank(NAME, "1.0.0", "bad")
    about = {"corpus": "c" * 64, "protocol": {}, "environment": {}, "result": {"perplexity": 12.5}}
    store.add_evaluation({"artifact": version.sha256, **about})
    return store


def push(source: LocalRegistry, target: LocalRegistry) -> None:
    for version in source.state(NAME).versions.values():
        copy_version(source, NAME, version, target)


WRITERS: dict[str, Callable[[LocalRegistry, LocalRegistry], object]] = {
    "every version": push,
    "kvq copy": lambda source, target: cli.main(["copy", NAME, target.url, "--registry", source.url]),
    "publish, promote, roll back": lambda source, target: (
        three(target),
        [target.promote(NAME, version) for version in ("1.0.0", "1.0.1", "1.0.2")],
        target.rollback(NAME),
    ),
    "gc beside what is named": lambda source, target: (
        push(source, target),
        [target.put_blob(data) for data in (b"nobody", b"names these")],
        target.collect(grace=0),
    ),
}


@pytest.mark.filterwarnings("ignore:.* is yanked:UserWarning")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_reader_finds_it_whole_at_every_point(write, source, tmp_path, monkeypatch, capsys):
    target, seen = LocalRegistry(tmp_path / "target"), []

    def point(name: str) -> None:
        monkeypatch.setattr(files, "fault_point", lambda name: None)
        now = read(target.root)
        lost = [one for one in (seen[-1] if seen else []) if one not in now and "production" not in one]
        assert not lost, f"at {name}"
        seen.append(now)
        monkeypatch.setattr(files, "fault_point", point)

    monkeypatch.setattr(files, "fault_point", point)
    write(source, target)
    monkeypatch.undo()
    assert len(seen) > 30 and seen[0] == [] and len({tuple(now) for now in seen}) >= 4
    assert set(seen[-1]) <= set(read(target.root))
