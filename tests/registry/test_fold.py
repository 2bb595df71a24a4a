"""A history is folded in time proportional to its events, and event by event it gives the same states."""

import gc
import time
from collections.abc import Callable, Iterable

import pytest

from kvq_runtime.errors import Conflict, NotFound
from kvq_runtime.registry import events
from kvq_runtime.registry.events import Change, Event, Promote, Publish, Rollback, State, Yank

AT = "2026-01-31T12:00:00Z"


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
