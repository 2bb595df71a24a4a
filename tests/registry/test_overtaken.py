"""What comes between two steps of a change is seen by the next step: each rival comes at one fixed moment."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_artifact as tiny
from hub_client import NAME, REPO, clear, tidy
from huggingface_hub import HfApi
from local_store import event_files, three

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import files
from kvq_runtime.errors import Conflict
from kvq_runtime.registry import resolve
from kvq_runtime.registry.hub import client
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.local import LocalRegistry

MOVED = r"points to 1\.0\.2, expected 1\.0\.1: somebody moved it"


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def overtake(monkeypatch: pytest.MonkeyPatch, place: object, step: str, rival) -> list[int]:
    """Let `rival` act once, just before the next call of a step; the list is no longer empty when it has."""
    real, came = getattr(place, step), []

    def overtaken(*given, **more):
        if not came:
            came.append(1)
            rival()
        return real(*given, **more)

    monkeypatch.setattr(place, step, overtaken)
    return came


def age(path: Path) -> None:
    """Make a file two days old, twice the grace that gc gives."""
    past = time.time() - 48 * 3600
    os.utime(path, (past, past))


# ---- rollback


@pytest.mark.parametrize("place, step", [(LocalRegistry, "change"), (files, "claim")], ids=["look", "claim"])
def test_a_rollback_in_a_folder_that_is_overtaken_undoes_nobodys_promote(place, step, store, monkeypatch):
    """The rival promotes after the alias was looked at, and after the rollback was decided."""
    three(store)
    for version in ("1.0.0", "1.0.1"):
        store.promote(NAME, version)
    came = overtake(monkeypatch, place, step, lambda: store.promote(NAME, "1.0.2"))
    with pytest.raises(Conflict, match=MOVED):
        store.rollback(NAME)
    assert came and store.state(NAME).at("production") == "1.0.2" and len(event_files(store)) == 6
    assert store.rollback(NAME).at("production") == "1.0.1"


@pytest.mark.parametrize("place, step", [(HubRegistry, "change"), (HfApi, "create_commit")], ids=["look", "commit"])
def test_a_rollback_on_a_hub_that_is_overtaken_undoes_nobodys_promote(place, step, hub, monkeypatch):
    store = HubRegistry("org")
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    for version in ("1.0.0", "1.0.1"):
        store.promote(NAME, version)
    came = overtake(monkeypatch, place, step, lambda: HubRegistry("org").promote(NAME, "1.0.2"))
    with pytest.raises(Conflict, match=MOVED):
        store.rollback(NAME)
    assert came and store.state(NAME).at("production") == "1.0.2"
    assert store.rollback(NAME).at("production") == "1.0.1"


# ---- gc and publish in a folder


def test_gc_gives_a_blob_back_that_became_young_before_it_was_moved(store, monkeypatch):
    """A publish writes the blob again, gc moves it aside, and no event names it yet."""
    store.publish("other", tiny.data(0))
    data = tiny.data(1)
    orphan = store.blob(store.put_blob(data))
    age(orphan)
    came = overtake(monkeypatch, LocalRegistry, "_remove", lambda: store.put_blob(data))
    assert store.collect() == []
    assert came and orphan.read_bytes() == data
    assert not list((store.root / "tmp").iterdir())


def test_a_publish_that_stalls_beyond_the_grace_writes_again_what_gc_took(store, monkeypatch):
    """Its blobs are old when gc looks, and no event names them: after the event they are there again."""
    data, card, taken = tiny.data(), b"# card", []

    def point(name: str) -> None:
        if name == "publish.blob" and len(blobs := list(store.root.glob("blobs/sha256/*"))) == 2:
            for path in blobs:
                age(path)
            taken.extend(store.collect())

    monkeypatch.setattr(files, "fault_point", point)
    version = store.publish(NAME, data, attachments={"README.md": card})
    assert sorted(Path(path).name for path in taken) == sorted([version.sha256, version.files["README.md"]["sha256"]])
    assert artifact.to_bytes(resolve.load_artifact(NAME, store.url)) == data
    assert store.attachments(NAME, version) == {"README.md": card}
    assert store.examine() == []


# ---- gc on a Hub


def test_gc_on_a_hub_that_is_overtaken_removes_nothing_that_a_publish_has_just_named(hub, monkeypatch, tmp_path):
    store, data = HubRegistry("org"), tiny.data(1)
    store.publish(NAME, tiny.data(0))
    repo = hub.repos[REPO]
    tree = dict(repo.at("main").tree)
    repo.add("main", "by hand", tree | {"versions/1.0.1/kvq.safetensors": repo.blob(b"left by somebody")})
    came = overtake(monkeypatch, HfApi, "create_commit", lambda: HubRegistry("org").publish(NAME, data))
    with pytest.raises(Conflict, match="somebody changed it first; nothing was removed, retry"):
        store.collect(grace=0)
    assert came and tidy(hub) == ["1.0.0", "1.0.1"]
    assert store.collect(grace=0) == []
    clear(monkeypatch, tmp_path)
    assert artifact.to_bytes(resolve.load_artifact(f"hf://org/{NAME}@1.0.1")) == data


# ---- a Hub that asks for patience


ACTIONS = {
    "read": ("GET /api/models/org/", lambda store: store.current_state(NAME)),
    "write": ("POST .*/commit/", lambda store: store.yank(NAME, "1.0.0", "bad")),
}


@pytest.mark.parametrize("wait, tries", [("60", client.TRIES), ("61", 1), ("3600", 1)])
@pytest.mark.parametrize("pattern, action", ACTIONS.values(), ids=ACTIONS)
def test_a_hub_that_asks_for_more_than_a_minute_is_not_waited_for(pattern, action, wait, tries, hub, monkeypatch):
    """A wait is as long as the Hub asks for, up to `MAX_WAIT`; for a longer one there is no second request."""
    store, slept = HubRegistry("org"), []
    store.publish(NAME, tiny.data())
    hub.faults.add(pattern, "status", times=1000, status=429, Retry_After=wait)
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=slept.append))
    with pytest.raises(RuntimeError, match=r"the Hub limits the rate of requests \(429\)"):
        action(store)
    assert len(hub.faults.happened) == tries and slept == [float(wait)] * (tries - 1)
