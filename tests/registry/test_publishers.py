"""Many processes change one name at once: every change is there once, whole, in an order that all of them agree on."""

from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import tiny_artifact as tiny
from hub_client import whole_versions
from local_store import NAME, damage
from patience import PATIENCE

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import files
from kvq_runtime.errors import Conflict
from kvq_runtime.registry.hub import HubRegistry
from kvq_runtime.registry.local import LocalRegistry

MANY = 4


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def at_once(work: Callable, arguments: list[tuple]) -> list:
    """What `work` returns for each of the arguments, in as many processes that begin together."""
    gate, found = forked.context.Barrier(len(arguments)), forked.context.SimpleQueue()

    def child(place: int) -> None:
        try:
            gate.wait(PATIENCE)
            found.put((place, work(*arguments[place])))
        except BaseException as error:
            found.put((place, error))
            raise

    children = [forked.process(child, place) for place in range(len(arguments))]
    for one in children:
        one.start()
    results = dict(found.get() for _ in children)
    for one in children:
        one.join(PATIENCE)
    failed = [result for result in results.values() if isinstance(result, BaseException)]
    assert not failed, failed
    return [results[place] for place in range(len(arguments))]


def publish(root: Path, seed: int) -> tuple[str, str]:
    version = LocalRegistry(root).publish(NAME, tiny.data(seed), attachments={"README.md": f"card {seed}".encode()})
    return version.version, version.sha256


def promote(root: Path, version: str, expect: str | None) -> str:
    try:
        LocalRegistry(root).promote(NAME, version, expect=expect, force=True)
    except Conflict as error:
        return str(error)
    return "done"


def change(root: Path, number: int) -> str:
    """Publish, point an alias of one's own to it, withdraw it: three changes that depend on each other."""
    store = LocalRegistry(root)
    version = store.publish(NAME, tiny.data(number)).version
    store.promote(NAME, version, alias=f"alias-{number}", force=True)
    store.promote(NAME, "1.0.0", alias=f"alias-{number}", force=True)
    store.yank(NAME, version, f"by {number}")
    return version


@pytest.mark.parametrize("seeds, count", [(range(MANY), MANY), ([0] * MANY, 1)], ids=["distinct", "identical"])
def test_many_publish_at_once(seeds, count, store):
    published = at_once(publish, [(store.root, seed) for seed in seeds])
    state = store.state(NAME)
    assert len(set(published)) == len(state.versions) == len(state.events) == count
    assert {(v.version, v.sha256) for v in state.versions.values()} == set(published)
    for version in state.versions.values():
        artifact.load(store.fetch(NAME, version), version.sha256, version.size)
        assert files.digest(store.blob(version.files["README.md"]["sha256"]))[1] == len("card 0")
    assert damage(store) == {}
    assert [event.number for event in state.events] == list(range(1, count + 1))
    assert list(state.versions) == [f"1.0.{n}" for n in range(count)], "a PATCH each, in their order"


def test_of_many_promotes_from_one_state_one_wins_and_the_others_ask(store):
    for seed in range(MANY + 1):
        store.publish(NAME, tiny.data(seed))
    store.promote(NAME, "1.0.0", force=True)
    versions = [f"1.0.{n}" for n in range(1, MANY + 1)]
    answers = at_once(promote, [(store.root, version, "1.0.0") for version in versions])
    now = store.state(NAME).at("production")
    assert answers.count("done") == 1 and versions[answers.index("done")] == now
    assert all(f"@production points to {now}, expected 1.0.0" in answer for answer in answers if answer != "done")


def test_many_that_do_everything_at_once_lose_nothing(store):
    store.publish(NAME, tiny.data(100))
    versions = at_once(change, [(store.root, number) for number in range(MANY)])
    state = store.state(NAME)
    assert len(set(versions)) == MANY and len(state.events) == 1 + 4 * MANY
    for number, version in enumerate(versions):
        kinds = [e.change.kind for e in state.events if version in (e.change.version, getattr(e.change, "reason", ""))]
        assert kinds == ["publish", "promote", "yank"]
        assert state.versions[version].yanked == f"by {number}" and state.at(f"alias-{number}") == "1.0.0"
    assert damage(store) == {}


def publish_on_a_hub(seed: int) -> tuple[str, str]:
    version = HubRegistry("org").publish(NAME, tiny.data(seed), attachments={"README.md": b"# card %d" % seed})
    return version.version, version.sha256


def test_many_publish_on_a_hub_at_once(hub):
    published = at_once(publish_on_a_hub, [(seed,) for seed in (0, 0, 1, 2)])
    state = HubRegistry("org").state(NAME)
    assert len(set(published)) == len(state.versions) == len(state.events) == 3 == len(whole_versions(hub))
    assert {(v.version, v.sha256) for v in state.versions.values()} == set(published)
    assert len(hub.repos[f"org/{NAME}"].log) == 4
