"""A registry is a fold over events, each of them whole or absent, however many processes write at once; it is folded in
time proportional to the events, and event by event it gives the same states.
"""

import gc
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_artifact as tiny
from local_store import NAME, event_files, three

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import events, registry, resolve
from kvq_runtime.registry.events import Change, Event, Promote, Publish, Rollback, State, Yank
from kvq_runtime.registry.local import LocalRegistry

AT = "2026-01-31T12:00:00Z"


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


# ---- publish


def test_a_published_file_is_read_only(store):
    version = store.publish(NAME, tiny.data(), attachments={"README.md": b"# card", "error.png": b"png"})
    found = resolve.resolve(NAME, store.url)
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o444
    assert store.blob(version.files["README.md"]["sha256"]).read_bytes() == b"# card"
    assert not list((store.root / "tmp").iterdir())


def test_the_next_version_says_what_changed(store):
    publish = lambda **settings: store.publish(NAME, tiny.data(**settings)).version  # noqa: E731
    assert publish() == "1.0.0"
    assert publish(seed=1) == "1.0.1"
    assert publish(environment="cuda") == "1.0.2"
    assert publish(corpus="b" * 64) == "1.1.0"
    assert publish(corpus="b" * 64, bits=3) == "1.2.0"
    assert publish(corpus="b" * 64, bits=3, model=1) == "2.0.0"
    assert publish(corpus="b" * 64, bits=3, model=1, seed=1) == "2.0.1"
    other_schema = replace(tiny.tiny(corpus="b" * 64, bits=3, model=1, seed=1), schema=0)
    assert registry.following(store.state(NAME), other_schema, store.fetch) == "3.0.0"


# ---- order of writing


def test_a_file_and_its_folder_are_synced_before_anything_relies_on_them(store, monkeypatch):
    """Record every step of a publish: data synced → named → folder synced, and all blobs before the event."""
    steps, real = [], {name: getattr(os, name) for name in ("fsync", "link", "replace")}
    path_of = lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: E731

    def named(kind):
        return lambda a, b: (steps.append((kind, str(a), str(b))), real[kind](a, b))[1]

    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(("fsync", path_of(fd))), real["fsync"](fd))[1])
    monkeypatch.setattr(os, "link", named("link"))
    monkeypatch.setattr(os, "replace", named("replace"))
    store.publish(NAME, tiny.data(), attachments={"README.md": b"card"})
    moves = [i for i, step in enumerate(steps) if step[0] != "fsync"]
    assert [steps[i][0] for i in moves] == ["replace", "replace", "link"]
    for i in moves:
        _, draft, target = steps[i]
        assert steps[i - 1] == ("fsync", draft)
        assert steps[i + 1] == ("fsync", str(Path(target).parent))
    assert steps[moves[-1]][2].endswith("events/00000001.json")
    synced = {step[1] for step in steps[: moves[-1]] if step[0] == "fsync"}
    assert {str(store.root), str(store.root / "names"), str(store.events_folder(NAME).parent)} <= synced


@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
def test_a_publish_that_dies_at_any_step_leaves_the_old_state(step, store, monkeypatch):
    store.publish(NAME, tiny.data(0))
    calls = 0
    for fatal in range(12):
        real, calls = getattr(os, step), 0

        def dies(*given, real=real, fatal=fatal):
            nonlocal calls
            calls += 1
            if calls > fatal:
                raise KeyboardInterrupt
            return real(*given)

        with monkeypatch.context() as patched:
            patched.setattr(os, step, dies)
            try:
                store.publish(NAME, tiny.data(1))
                break
            except KeyboardInterrupt:
                state = store.state(NAME)  # readable, and either the old state or the new one, whole
                assert list(state.versions) in (["1.0.0"], ["1.0.0", "1.0.1"])
                assert all(artifact.load(store.fetch(NAME, v), v.sha256, v.size) for v in state.versions.values())
    assert fatal > 0
    assert store.publish(NAME, tiny.data(1)).version == "1.0.1"
    assert len(event_files(store)) == 2


def test_newest_is_by_number_and_not_by_text(store):
    for seed, version in enumerate(["1.10.0", "1.9.0", "1.2.0"]):
        store.publish(NAME, tiny.data(seed), version=version)
    assert resolve.resolve(NAME, store.url).version == "1.10.0"


# ---- evaluations


def record(store: LocalRegistry, perplexity: float = 12.5) -> dict:
    digest = resolve.resolve(NAME, store.url).sha256
    result = {"perplexity": perplexity}
    return {"artifact": digest, "corpus": "c" * 64, "protocol": {"steps": 32}, "environment": {}, "result": result}


def test_evaluations_are_records_that_never_change(store):
    store.publish(NAME, tiny.data())
    first = store.add_evaluation(record(store))
    second = store.add_evaluation(record(store, 13.0))
    found = store.evaluations(record(store)["artifact"])
    assert sorted(one["result"]["perplexity"] for one in found) == [12.5, 13.0] and first != second
    path = store.root / "evaluations" / record(store)["artifact"] / f"{first}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    path.chmod(0o644)
    path.write_text(path.read_text().replace("12.5", "1.25"))
    with pytest.raises(ArtifactError, match="evaluation: sha256 is"):
        store.evaluations(record(store)["artifact"])
    assert [finding.path for finding in store.examine() if finding.level == "fault"] == [str(path)]


def test_an_evaluation_that_lies_with_another_artifact_is_refused(store):
    """Its name is its own digest, and right; only the folder is not that of the artifact that was measured."""
    three(store)
    digest = store.add_evaluation(record(store))
    other = store.state(NAME).versions["1.0.0"].sha256
    path = store.root / "evaluations" / record(store)["artifact"] / f"{digest}.json"
    moved = store.root / "evaluations" / other / path.name
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(ArtifactError, match=f"{moved}: evaluation: is about .*, but stored with another artifact"):
        store.evaluations(other)
    assert str(moved) in [finding.path for finding in store.examine() if finding.level == "fault"]


def published(count: int) -> list[Change]:
    return [Publish(f"1.0.{n}", f"{n:064x}", 1) for n in range(count)]


def promotes(count: int) -> list[Change]:
    return published(2) + [Promote("production", f"1.0.{n % 2}") for n in range(count - 2)]


def back_and_forth(count: int) -> list[Change]:
    """As many rollbacks as promotes, the first half of the promotes never undone."""
    there = [Promote("production", f"1.0.{n % 2}") for n in range(count // 2)]
    return published(2) + there + [Rollback("production", f"1.0.{n % 2}") for n in reversed(range(count // 2 - 1))]


def aliases(count: int) -> list[Change]:
    """Every version under its own alias, moved to the last, then yanked: a yank looks at no alias but its own."""
    third = count // 4
    there = [Promote(f"a{n}", f"1.0.{n}") for n in range(third)]
    away = [Promote(f"a{n}", f"1.0.{third - 1}") for n in range(third)]
    return published(third) + there + away + [Yank(f"1.0.{n}", "old") for n in range(third - 1)]


def numbered(changes: Iterable[Change]) -> list[Event]:
    return [Event(number, "x", AT, change) for number, change in enumerate(changes, 1)]


@pytest.fixture
def uncollected():
    """Python's collector looks at every event again and again: that time is not the fold's."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", [published, promotes, back_and_forth, aliases])
def test_ten_times_the_events_take_ten_times_as_long(make: Callable[[int], list[Change]], uncollected):
    taken = []
    for count, times in ((3_000, 5), (30_000, 1)):
        given, seconds = numbered(make(count)), []
        for _ in range(times):
            begun = time.thread_time()
            assert len(events.fold("x", given).events) == len(given)
            seconds.append(time.thread_time() - begun)
        taken.append(min(seconds))
    assert taken[1] < 50 * taken[0], f"{taken} s"
    assert taken[1] < 4


@pytest.mark.parametrize("make", [published, promotes, back_and_forth, aliases])
def test_event_by_event_is_all_at_once(make):
    state, given = State("x"), numbered(make(60))
    for event in given:
        state = state.apply(event)
    assert state == events.fold("x", given)


def test_a_rollback_passes_over_yanked_versions_and_forgets_what_it_left():
    moves = [Promote("production", f"1.0.{n}") for n in (0, 1, 2, 1)]
    state = events.fold("x", numbered(published(3) + moves + [Yank("1.0.2", "bad")]))
    assert state.before("production") == "1.0.0"
    state = state.apply(Event(9, "x", AT, Rollback("production", "1.0.0")))
    assert state.aliases == {"production": ("1.0.0",)}
    with pytest.raises(NotFound, match="x@production has no earlier version"):
        state.apply(Event(10, "x", AT, Rollback("production", "1.0.0")))
    with pytest.raises(Conflict, match="1.0.0 is production; promote another version first"):
        state.apply(Event(10, "x", AT, Yank("1.0.0", "bad")))
    yanked = state.apply(Event(10, "x", AT, Yank("1.0.1", "bad")))  # no alias points to it any more
    assert yanked.versions["1.0.1"].yanked == "bad" and state.versions["1.0.1"].yanked is None
