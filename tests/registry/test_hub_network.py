"""A registry on a Hub, whatever the network does: never half a version; asked as little as can be."""

import socket
import warnings
from hashlib import sha256

import huggingface_hub
import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, asked, clear, tidy
from huggingface_hub import constants

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import resolve
from kvq_runtime.registry.hub import client
from kvq_runtime.registry.hub import index as hub_index
from kvq_runtime.registry.hub.registry import HubRegistry


@pytest.fixture
def store(hub) -> HubRegistry:
    return resolve.open_registry("hf://org")


# ---- faults: never half a version, and the same command again succeeds with the same digest

UPLOADS = {
    "429": ("POST .*/commit/", "status", {"status": 429, "Retry_After": "1"}),
    "500": ("POST .*/commit/", "status", {"status": 500}),
    "503 of the batch": ("POST .*objects/batch", "status", {"status": 503}),
    "reset in mid-upload": ("PUT /lfs", "reset", {}),
    "reset in mid-commit": ("POST .*/commit/", "reset", {}),
    "lost answer of an upload": ("PUT /lfs", "lost", {}),
    "lost answer of a commit": ("POST .*/commit/", "lost", {}),
    "lost answer of a tag": ("POST .*/tag/", "lost", {}),
    "lost answer of a new repository": ("POST /api/repos/create", "lost", {}),
}


@pytest.mark.parametrize("pattern, kind, more", UPLOADS.values(), ids=UPLOADS)
def test_a_publish_lives_through_one_fault(pattern, kind, more, hub, store):
    hub.faults.add(pattern, kind, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a tag may be left for the next time
        assert store.publish(NAME, tiny.data(), attachments=CARD).version == "1.0.0"
    assert len(hub.faults.happened) == 1 and tidy(hub) == ["1.0.0"]
    again = store.publish(NAME, tiny.data(), attachments=CARD)
    assert again.sha256 == sha256(tiny.data()).hexdigest() and len(hub.repos[REPO].log("main")) == 2
    assert list(hub.repos[REPO].tags) == ["v1.0.0"]


@pytest.mark.parametrize("pattern, kind, more", list(UPLOADS.values())[:7], ids=list(UPLOADS)[:7])
def test_a_publish_that_fails_leaves_what_was(pattern, kind, more, hub, store):
    store.publish(NAME, tiny.data(0))
    hub.faults.add(pattern, kind, times=1000, **more)
    try:
        store.publish(NAME, tiny.data(1), attachments=CARD)
        assert "lost" in kind
    except RuntimeError as error:
        assert "the Hub" in str(error)
    hub.faults = type(hub.faults)()
    assert tidy(hub) in (["1.0.0"], ["1.0.0", "1.0.1"])
    assert store.publish(NAME, tiny.data(1), attachments=CARD).sha256 == sha256(tiny.data(1)).hexdigest()
    assert tidy(hub) == ["1.0.0", "1.0.1"]


@pytest.mark.parametrize("kind", ["reset", "short", "flip", "drip", "status"])
def test_a_load_lives_through_one_fault(kind, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add("GET /lfs", kind, status=503)
    assert artifact.to_bytes(resolve.load_artifact(f"hf://org/{NAME}")) == tiny.data()
    assert len(hub.faults.happened) == 1


@pytest.mark.parametrize("kind", ["reset", "short", "flip"])
def test_a_load_that_fails_keeps_nothing_that_is_wrong(kind, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add("GET /lfs", kind, times=100)
    with pytest.raises((ArtifactError, RuntimeError), match="sha256: the Hub sent|no answer from the Hub"):
        resolve.load_artifact(f"hf://org/{NAME}")
    hub.faults = type(hub.faults)()
    assert artifact.to_bytes(resolve.load_artifact(f"hf://org/{NAME}")) == tiny.data()


def test_a_lost_answer_of_a_promote_is_looked_up(hub, store):
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    store.promote(NAME, "1.0.0")
    for action, wanted in ((lambda: store.promote(NAME, "1.0.1"), "1.0.1"), (lambda: store.rollback(NAME), "1.0.0")):
        commits = len(hub.repos[REPO].log("main"))
        hub.faults.add("POST .*/commit/", "lost")
        assert action().at("production") == wanted
        assert len(hub.repos[REPO].log("main")) == commits + 1


# ---- what is asked of the network


def pinned(tmp_path, version: str = "") -> str:
    """A lock file."""
    from kvq_runtime.cli import main as cli

    lock = str(tmp_path / "kvq.lock")
    assert cli.main(["pull", f"hf://org/{NAME}{version}", "-o", str(tmp_path / "out"), "--lock", lock]) == 0
    return lock


def test_a_warm_load_asks_nothing_with_a_lock_and_once_for_an_alias(hub, store, tmp_path, capsys):
    store.publish(NAME, tiny.data(), attachments=CARD)
    store.promote(NAME, "1.0.0")
    lock = pinned(tmp_path)
    hub.requests.clear()
    resolve.load_artifact(f"hf://org/{NAME}", lock=lock)
    assert asked(hub) == []
    resolve.load_artifact(f"hf://org/{NAME}@production")
    assert len(asked(hub)) == 1
    store.publish(NAME, tiny.data(1))
    store.promote(NAME, "1.0.1")
    found = resolve.resolve(f"hf://org/{NAME}", lock=lock)
    assert found.version == "1.0.0" and found.chosen_because == f"pinned by {lock}"


def test_offline_from_the_cache(hub, store, tmp_path, monkeypatch, capsys):
    store.publish(NAME, tiny.data())
    store.promote(NAME, "1.0.0")
    lock = pinned(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    for given in (NAME, f"{NAME}@production", f"{NAME}@1.0.0"):
        assert resolve.resolve(f"hf://org/{given}").version == "1.0.0"
    resolve.load_artifact(f"hf://org/{NAME}", lock=lock)
    clear(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match="offline.*kvq pull once while online"):
        resolve.load_artifact(f"hf://org/{NAME}", lock=lock)
    assert asked(hub) == []


def test_a_file_that_was_damaged_in_the_cache_is_refused_and_fetched_again(hub, store, tmp_path, capsys):
    store.publish(NAME, tiny.data())
    lock = pinned(tmp_path)
    path = resolve.resolve(f"hf://org/{NAME}", lock=lock).path
    path.write_bytes(tiny.data()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="sha256: .*fetch it again"):
        resolve.load_artifact(f"hf://org/{NAME}", lock=lock)
    pinned(tmp_path)
    resolve.load_artifact(f"hf://org/{NAME}", lock=lock)


def test_an_index_that_was_edited_in_the_cache_is_not_believed(hub, store):
    """What is there by now has the form of an index, but not the digest that names it."""
    store.publish(NAME, tiny.data())
    assert resolve.resolve(f"hf://org/{NAME}").version == "1.0.0"
    kept = {path.resolve() for path in client.cache_folder().rglob(hub_index.FILE)}
    for path in kept:
        path.write_bytes(path.read_bytes().replace(b"1.0.0", b"9.0.0"))
    hub.requests.clear()
    assert resolve.resolve(f"hf://org/{NAME}").version == "1.0.0"
    assert kept and any(hub_index.FILE in line for line in asked(hub)), "received again"


@pytest.mark.parametrize("times", [1, 2])
def test_an_index_that_was_damaged_on_its_way_is_fetched_again(times, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add(f"GET .*/{hub_index.FILE}", "flip", times)
    if times == 2:
        with pytest.raises(ArtifactError, match="twice; expected its ETag .*; nothing was kept"):
            resolve.load_artifact(f"hf://org/{NAME}")
    assert artifact.to_bytes(resolve.load_artifact(f"hf://org/{NAME}")) == tiny.data()
    assert len(hub.faults.happened) == times


def test_a_hub_that_is_gone_is_a_warning_where_the_cache_knows(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    store.promote(NAME, "1.0.0")
    resolve.resolve(f"hf://org/{NAME}")
    hub.faults.add("GET /api/models", "status", times=1000, status=503)
    with pytest.warns(UserWarning, match="as of its last answer"):
        assert resolve.resolve(f"hf://org/{NAME}").version == "1.0.0"
    with pytest.raises(RuntimeError, match="no answer from the Hub"):
        store.promote(NAME, "1.0.0", expect="none")
    clear(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match="no answer from the Hub"):
        resolve.resolve(f"hf://org/{NAME}")


def test_a_hub_that_takes_a_request_and_says_nothing_is_given_up(hub, store, monkeypatch):
    """huggingface_hub itself would wait for ever."""
    for module, name in ((constants, "HF_HUB_ETAG_TIMEOUT"), (client, "SILENCE")):
        monkeypatch.setattr(module, name, 0.1)
    huggingface_hub.close_session()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for ask in (lambda: resolve.resolve(f"hf://org/{NAME}"), lambda: store.publish(NAME, tiny.data())):
            # which limit is reached first, that of a read or that of the whole, is up to the machine
            given_up = "no answer from the Hub at .* after 5 tries: .*timed out|took more than .* to begin"
            with pytest.raises(RuntimeError, match=given_up):
                ask()
