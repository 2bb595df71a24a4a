"""A registry is a fold over events, in time proportional to their number; a strange event is refused by name."""

import gc
import time
from collections.abc import Iterable

import pytest
import tiny_artifact as tiny
from local_store import NAME, event_files, three

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import events, resolve
from kvq_runtime.registry.events import Change, Event, Promote, Publish, Rollback, Yank
from kvq_runtime.registry.local import LocalRegistry

AT = "2026-01-31T12:00:00Z"
BY = "me@here"


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def published(count: int) -> list[Change]:
    return [Publish(f"1.0.{n}", f"{n:064x}", 1) for n in range(count)]


def back_and_forth(count: int) -> list[Change]:
    """As many rollbacks as promotes, the first half of the promotes never undone."""
    there = [Promote("production", f"1.0.{n % 2}") for n in range(count // 2)]
    return published(2) + there + [Rollback("production", f"1.0.{n % 2}") for n in reversed(range(count // 2 - 1))]


def numbered(changes: Iterable[Change]) -> list[Event]:
    return [Event(number, "x", AT, BY, change) for number, change in enumerate(changes, 1)]


def test_ten_times_the_events_take_ten_times_as_long():
    gc.disable()  # Python's collector looks at every event again and again: that time is not the fold's
    taken = []
    for count, times in ((2_000, 5), (20_000, 1)):
        given, seconds = numbered(back_and_forth(count)), []
        for _ in range(times):
            begun = time.thread_time()
            assert len(events.fold("x", given).events) == len(given)
            seconds.append(time.thread_time() - begun)
        taken.append(min(seconds))
    gc.enable()
    assert taken[1] < 50 * taken[0], f"{taken} s"


def test_a_rollback_passes_over_yanked_versions_and_forgets_what_it_left():
    moves = [Promote("production", f"1.0.{n}") for n in (0, 1, 2, 1)]
    state = events.fold("x", numbered(published(3) + moves + [Yank("1.0.2", "bad")]))
    assert state.before("production")[0] == "1.0.0"
    state.add(Event(9, "x", AT, BY, Rollback("production", "1.0.0")))
    assert state.aliases == {"production": ["1.0.0"]}
    before = len(state.events)
    with pytest.raises(NotFound, match=r"has no earlier version to go back to; promote a version"):
        state.add(Event(10, "x", AT, BY, Rollback("production", "1.0.0")))
    with pytest.raises(Conflict, match="1.0.0 is production; promote another version first"):
        state.add(Event(10, "x", AT, BY, Yank("1.0.0", "bad")))
    assert len(state.events) == before and state.versions["1.0.1"].yanked is None
    state.add(Event(10, "x", AT, BY, Yank("1.0.1", "bad")))  # no alias points to it any more
    assert state.versions["1.0.1"].yanked == "bad"


def test_a_rollback_names_the_yanked_versions_that_it_may_not_go_back_to():
    moves = [Promote("production", f"1.0.{n}") for n in (0, 1, 2, 0, 2)]
    state = events.fold("x", numbered(published(3) + moves + [Yank("1.0.0", "bad"), Yank("1.0.1", "old")]))
    with pytest.raises(NotFound, match=r"go back to; 1.0.0 is yanked \(bad\); 1.0.1 is yanked \(old\); promote a"):
        state.before("production")


GOOD = {"schema": 1, "number": 2, "name": NAME, "at": AT, "by": BY}
PROMOTE = GOOD | {"kind": "promote", "alias": "production", "version": "1.0.0", "force": False}
YANK = GOOD | {"kind": "yank", "version": "1.0.0", "reason": "x"}
ABOUT = dict.fromkeys(events.ABOUT)
PUBLISH = GOOD | {"kind": "publish", "version": "2.0.0", "sha256": "a" * 64, "size": 1, "files": {}, "about": ABOUT}
EVENTS = {
    "torn": (b'{"schema":1,"numb', "invalid JSON"),
    "newer": (YANK | {"schema": 2}, "a newer kvq may have written it"),
    "unknown kind": (GOOD | {"kind": "delete", "version": "1.0.0"}, "kind 'delete'"),
    "other name": (YANK | {"name": "../x"}, "expected .*, got"),
    "other number": (YANK | {"number": 3}, "expected .*, got"),
    "climbing alias": (PROMOTE | {"alias": "../../x"}, "alias '../../x'"),
    "climbing digest": (PUBLISH | {"sha256": "../" + "a" * 61}, "sha256 '../"),
    "climbing file": (PUBLISH | {"files": {"../../.bashrc": {"sha256": "a" * 64, "size": 1}}}, "file name '../../.b"),
    "climbing digest of a file": (PUBLISH | {"files": {"README.md": {"sha256": "/etc", "size": 1}}}, "sha256 '/etc'"),
    "large file": (
        PUBLISH | {"files": {"README.md": {"sha256": "a" * 64, "size": events.MAX_FILE + 1}}},
        "size .*whole number from 0 to 67108864",
    ),
    "half a force": (PROMOTE | {"force": 1}, "force 1; use true or false"),
    "nobody": (YANK | {"by": ""}, "by ''; use one line of 1 to 500"),
    "an escape": (YANK | {"reason": "\x1b[2J"}, "use one line of 1 to 500"),
}


@pytest.mark.parametrize("given, message", EVENTS.values(), ids=EVENTS.keys())
def test_a_strange_event_is_refused_and_named(given, message, store):
    data = tiny.data()
    store.write(events.fold(NAME, []), Event(1, NAME, AT, BY, Publish("1.0.0", store.put_blob(data), len(data))), {})
    path = store.events_folder(NAME) / "00000002.json"
    path.write_bytes(given if isinstance(given, bytes) else strict_json.dumps(given).encode())
    for action in (lambda: resolve.resolve(NAME, store.url), lambda: store.publish(NAME, tiny.data(1))):
        with pytest.raises(ArtifactError, match=f"{path}: .*{message}"):
            action()


def test_a_missing_or_misnamed_event_is_an_error_and_not_an_older_state(store):
    three(store)
    misnamed = event_files(store)[-1].rename(store.events_folder(NAME) / "copy of 2.json")  # the only one with its blob
    for action in (lambda: store.state(NAME), lambda: store.publish(NAME, tiny.data(6))):
        with pytest.raises(ArtifactError, match=f"{misnamed}: event: not its name; use eight digits"):
            action()
    assert store.names() == [NAME]
    misnamed.rename(store.events_folder(NAME) / "00000003.json")
    event_files(store)[1].unlink()
    with pytest.raises(ArtifactError, match=r"00000002\.json: event: missing"):
        store.state(NAME)
    (store.events_folder(NAME) / "00000002.json").symlink_to(event_files(store)[0])
    with pytest.raises(ArtifactError, match="symbolic link"):
        store.state(NAME)
