"""What every registry does, in a folder and on a Hub."""

from hashlib import sha256

import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME
from local_store import damage, three

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import resolve
from kvq_runtime.registry.registry import Registry


@pytest.fixture
def store(any_registry: Registry) -> Registry:
    return any_registry


def chosen(store: Registry, which: str = "") -> tuple[str, str]:
    found = resolve.resolve(NAME + which, store.url)
    return found.version, found.chosen_because


# ---- publish and load


def test_a_published_artifact_comes_back(store: Registry):
    data = tiny.data()
    version = store.publish(NAME, data, attachments=CARD)
    assert store.publish(NAME, data, version="3.0.0") == version, "identical bytes are the existing version"
    there = resolve.open_registry(store.url)
    found = resolve.resolve(NAME, store.url)
    assert (found.version, found.sha256, found.size) == ("1.0.0", sha256(data).hexdigest(), len(data))
    assert found.path.read_bytes() == data and found.registry == store.url
    assert artifact.to_bytes(resolve.load_artifact(f"{NAME}@1.0.0", store.url)) == data
    assert there.state(NAME).versions == {"1.0.0": version} and there.attachments(NAME, version) == CARD
    about = {"recipe": "tiny", "model": "tiny-model", "revision": "main", "corpus": "a" * 64, "corpus_digest": None}
    assert version.about == about
    assert there.names() == [NAME] and damage(there) == {}


def test_a_number_says_what_changed_and_is_never_used_twice(store: Registry):
    store.publish(NAME, tiny.data(0), attachments=CARD)
    assert store.publish(NAME, tiny.data(1)).version == "1.0.1"
    assert store.publish(NAME, tiny.data(1, bits=3)).version == "1.1.0"
    assert store.publish(NAME, tiny.data(1, model=1)).version == "2.0.0"
    store.yank(NAME, "1.0.1", "bad")
    for taken in ("1.0.0", "1.0.1"):
        with pytest.raises(Conflict, match=rf"{taken} is published with other bytes"):
            store.publish(NAME, tiny.data(5), version=taken)
    assert list(store.state(NAME).versions) == ["1.0.0", "1.0.1", "1.1.0", "2.0.0"]


def test_only_artifacts_are_published(store: Registry):
    with pytest.raises(ArtifactError, match="^finite"):
        store.publish(NAME, tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT] * float("nan")}))
    with pytest.raises(ArtifactError, match="^provenance: model 7; expected text"):
        store.publish(NAME, tiny.resealed(provenance={"model": 7}))
    assert store.names() == []


# ---- several publishers


@pytest.mark.parametrize("step", ["change", "write"], ids=["look", "write"])
def test_a_promote_or_rollback_that_is_overtaken_loses(step, store: Registry, monkeypatch):
    """The rival comes after the alias was looked at, and after the change was decided."""
    three(store)
    for version in ("1.0.0", "1.0.1"):
        store.promote(NAME, version, force=True)
    for action in (lambda: store.rollback(NAME), lambda: store.promote(NAME, "1.0.0", force=True)):
        real, came = getattr(type(store), step), []

        def overtaken(*given, real=real, came=came, **more):
            if not came:
                came.append(1)
                resolve.open_registry(store.url).promote(NAME, "1.0.2", force=True)
            return real(*given, **more)

        with monkeypatch.context() as patched:
            patched.setattr(type(store), step, overtaken)
            with pytest.raises(Conflict, match=r"points to 1\.0\.2, expected 1\.0\.1: somebody moved it"):
                action()
        assert came and store.state(NAME).at("production") == "1.0.2"
        assert store.rollback(NAME).at("production") == "1.0.1"


# ---- aliases, yanks, history


def test_a_name_alone_is_production_else_the_newest(store: Registry):
    three(store)
    assert chosen(store) == ("1.0.2", "newest of 3 not yanked; no version is production")
    store.promote(NAME, "1.0.1", force=True)
    assert chosen(store) == ("1.0.1", "production points to it")
    assert chosen(store, "@1.0.0") == ("1.0.0", "asked for by number")
    assert chosen(store, "@production")[0] == "1.0.1"
    assert chosen(store, f"@sha256:{sha256(tiny.data(2)).hexdigest()}") == ("1.0.2", "asked for by digest")


def test_rollback_undoes_promote(store: Registry):
    three(store)
    states = []
    for version in ("1.0.0", "1.0.1", "1.0.2"):
        states.append(store.state(NAME).aliases)
        store.promote(NAME, version, force=True)
    while states[1:]:
        assert store.rollback(NAME).aliases == states.pop()
    with pytest.raises(NotFound, match="has no earlier version to go back to"):
        store.rollback(NAME)


def test_a_stale_promote_loses_and_asks(store: Registry):
    three(store)
    store.promote(NAME, "1.0.0", expect="none", force=True)
    store.promote(NAME, "1.0.1", expect="1.0.0", force=True)
    with pytest.raises(Conflict, match=r"points to 1\.0\.1, expected 1\.0\.0.*--expect 1\.0\.1"):
        store.promote(NAME, "1.0.2", expect="1.0.0", force=True)
    with pytest.raises(ValueError, match="version '3'"):
        store.promote(NAME, "1.0.1", expect="3", force=True)
    again = store.promote(NAME, "1.0.1", expect="1.0.0", force=True)  # it is what was asked for
    assert again.at("production") == "1.0.1"
    assert len(store.state(NAME).events) == 5


def test_yanked_versions_are_chosen_only_by_number(store: Registry):
    three(store)
    store.yank(NAME, "1.0.2", "wrong corpus")
    assert chosen(store)[0] == "1.0.1"
    assert resolve.resolve(f"{NAME}@1.0.2", store.url).yanked == "wrong corpus"
    with pytest.warns(UserWarning, match=r"1\.0\.2 is yanked: wrong corpus"):
        resolve.load_artifact(f"{NAME}@1.0.2", store.url)
    with pytest.raises(Conflict, match="is yanked"):
        store.promote(NAME, "1.0.2", force=True)
    with pytest.raises(Conflict, match="is yanked already"):
        store.yank(NAME, "1.0.2", "again")
    with pytest.raises(ValueError, match="reason"):
        store.yank(NAME, "1.0.0", "  ")


# ---- records


def test_records_are_added_once(store: Registry):
    digest = store.publish(NAME, tiny.data(), attachments=CARD).sha256
    record = {"artifact": digest, "corpus": "c" * 64, "protocol": {}, "environment": {}, "result": {"perplexity": 12.5}}
    assert store.evaluations(digest, NAME) == []
    assert store.add_evaluation(record, NAME) == store.add_evaluation(record, NAME)
    assert store.evaluations(digest, NAME) == [record] and store.signatures(digest, NAME) == []
    with pytest.raises(ArtifactError, match="unknown keys"):
        store.add_evaluation(record | {"host": "mine"}, NAME)
    with pytest.raises(ArtifactError, match=r"sha256 '\.\./x'"):
        store.add_evaluation(record | {"artifact": "../x"}, NAME)
    for _ in range(2):
        store.add_record("signatures", digest, b"{}\n", NAME)
    assert store.signatures(digest, NAME) == [b"{}\n"] and store.evaluations(digest, NAME) == [record]


# ---- clear errors


def test_what_is_not_there_is_said(store: Registry):
    with pytest.raises(NotFound, match=f"no artifact other .*{store.url.partition('//')[2]}"):
        resolve.resolve("other", store.url)
    three(store)
    for given, message in (("@2.0.0", "has no version 2.0.0; it has 1.0.0, 1.0.1, 1.0.2"), ("@beta", "no alias beta"),
                           (f"@sha256:{'0' * 64}", "no version with sha256 0000")):  # fmt: skip
        with pytest.raises(NotFound, match=message):
            resolve.resolve(NAME + given, store.url)
    for action in (lambda: store.promote(NAME, "2.0.0", force=True), lambda: store.yank(NAME, "2.0.0", "bad")):
        with pytest.raises(NotFound, match=r"has no version 2\.0\.0"):
            action()
