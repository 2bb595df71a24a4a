"""A registry on a Hub: whole versions or none, however many publish at once, and aliases that move."""

import gc
import multiprocessing
from hashlib import sha256

import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, clear, tidy
from huggingface_hub import HfApi

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import Conflict
from kvq_runtime.registry import resolve
from kvq_runtime.registry.hub.registry import HubRegistry


@pytest.fixture
def store(hub) -> HubRegistry:
    return resolve.open_registry("hf://org")


# ---- publish and load


def test_a_published_artifact_comes_back_on_another_machine(hub, store, monkeypatch, tmp_path):
    data = tiny.data()
    version = store.publish(NAME, data, attachments=CARD)
    assert (version.version, version.sha256) == ("1.0.0", sha256(data).hexdigest())
    assert tidy(hub) == ["1.0.0"] and store.names() == [NAME]
    assert len(hub.repos[REPO].log("main")) == 2  # the Hub's own first commit, and one for all of it
    assert hub.repos[REPO].tags == {"v1.0.0": hub.repos[REPO].branches["main"]}
    card = hub.content(hub.repos[REPO], hub.repos[REPO].at("main").tree["README.md"])
    assert b"![e](versions/1.0.0/error.png)" in card
    clear(monkeypatch, tmp_path)
    fresh = HubRegistry("org")
    found = resolve.resolve(f"hf://org/{NAME}")
    assert (found.version, found.registry) == ("1.0.0", "hf://org") and found.path.read_bytes() == data
    assert found.commit == hub.repos[REPO].branches["main"]
    assert artifact.to_bytes(resolve.load_artifact(f"hf://org/{NAME}@1.0.0")) == data
    assert fresh.attachments(NAME, fresh.state(NAME).versions["1.0.0"]) == CARD
    assert fresh.about(NAME, version) == {
        "recipe": "tiny", "model": "tiny-model", "revision": "main", "corpus": "a" * 64, "corpus_digest": None,
    }  # fmt: skip


def _publish(seed: int) -> tuple[str, str]:
    beside = {"README.md": b"---\ntags: [kvq]\n---\n# card %d" % seed}
    version = HubRegistry("org").publish(NAME, tiny.data(seed), attachments=beside)
    return version.version, version.sha256


@pytest.mark.parametrize("seeds, count", [(range(8), 8), ([0] * 8, 1)], ids=["distinct", "identical"])
def test_eight_processes_publish_at_once(seeds, count, hub, store):
    with multiprocessing.get_context("fork").Pool(8, gc.freeze) as pool:
        published = pool.map(_publish, seeds, chunksize=1)
        pool.close()
        pool.join()  # each ends by itself; one that waits for a lock does not end by a signal
    state = store.state(NAME)
    assert len(set(published)) == len(state.versions) == len(state.events) == count == len(tidy(hub))
    assert {(v.version, v.sha256) for v in state.versions.values()} == set(published)
    assert len(hub.repos[REPO].log("main")) == 1 + count
    assert set(hub.repos[REPO].tags) == {f"v{version}" for version in state.versions}
    assert store.examine() == []


# ---- aliases


def test_a_promote_that_any_change_overtakes_stops_and_asks(hub, store, monkeypatch):
    for seed in range(2):
        store.publish(NAME, tiny.data(seed))
    real, raced = HfApi.create_commit, []

    def overtaken(self, *given, **more):
        if not raced:
            raced.append(1)
            HubRegistry("org").publish(NAME, tiny.data(7))
        return real(self, *given, **more)

    monkeypatch.setattr(HfApi, "create_commit", overtaken)
    with pytest.raises(Conflict, match="somebody changed tiny-2bit first"):
        store.promote(NAME, "1.0.1")
    assert store.state(NAME).at("production") is None
    assert store.promote(NAME, "1.0.1").at("production") == "1.0.1"
