"""Nothing torn, nothing lost: commands killed at every point and at any moment, on a full disk, before a power cut.

After each kill the registry opens, every version in it verifies, and none is half there; the same command again ends
with the same digests, and only drafts are left: see `chaos.Case.disturb`. KVQ_KILLS is how many are
killed at random moments, and how often a Hub fails.
"""

import fcntl
import os
import random
from collections.abc import Callable, Iterator
from functools import cache

import chaos
import forked
import pytest
from hub_client import TOKEN
from hub_server import Hub

from kvq_runtime.disk import files

KILLS = int(os.environ.get("KVQ_KILLS", "4"))  # of a command
ON_A_HUB = [name for name in chaos.COMMANDS if "Hub" in name or name == "push"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Iterator[Callable[[str], chaos.Case]]:
    with Hub() as hub:
        hub.users = {TOKEN: ("me", "write")}
        yield cache(lambda name: chaos.Case(name, tmp_path_factory.mktemp("chaos"), hub))


def alone(*names: str) -> list:
    """Commands as parameters: a quick one, and slow ones; one worker makes the case of each."""
    slow = [[] if name == "promote" else [pytest.mark.slow] for name in names]
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(f"faults: {name}"), *marks])
        for name, marks in zip(names, slow, strict=True)
    ]


@pytest.mark.parametrize("name", alone(*chaos.COMMANDS))
def test_killed_at_every_point(name, cases):
    case = cases(name)
    chaos.Disk().play(case.undisturbed.steps)
    faults = case.faults()[:: 3 if name == "promote" else 1]  # the quick tier kills at every third point
    assert faults and [case.disturb(fault).code for fault in faults] == [-9] * len(faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", alone(*chaos.COMMANDS))
def test_killed_at_any_moment(name, cases):
    case, draw = cases(name), random.Random(name)
    for _ in range(KILLS):
        case.disturb(kill_after=draw.uniform(0, case.undisturbed.seconds))


@pytest.mark.slow
@pytest.mark.parametrize("name", alone(*chaos.COMMANDS))
def test_a_full_disk_at_every_point(name, cases):
    case = cases(name)
    for fault in case.faults():
        ended = case.disturb(f"{fault}:full")
        assert "No space left on device" in ended.output if ended.code else name in ON_A_HUB, f"{fault}: {ended.output}"
        assert ended.code in (0, 1) and "Traceback" not in ended.output  # 0: a cache that cannot be written to forgets


@pytest.mark.slow
@pytest.mark.parametrize("name", alone(*ON_A_HUB))
def test_a_hub_that_fails(name, cases):
    case = cases(name)
    ways = [{"kind": "status", "status": 500}, {"kind": "reset"}, {"kind": "lost"}]
    every = [
        {"pattern": f"^{request}$", "times": n, **way} for request in case.requests for way in ways for n in (1, 99)
    ]
    for trouble in random.Random(name).sample(every, min(KILLS, len(every))):
        ended = case.disturb(**trouble)
        assert ended.code in (0, 1) and "Traceback" not in ended.output, f"{trouble}: {ended.output}"
        assert ended.code == 0 or trouble["times"] > 1, f"one {trouble} was not lived through: {ended.output}"


def test_a_draft_is_removed_when_its_process_is_dead(tmp_path, monkeypatch):
    child = forked.process(forked.leave_draft, tmp_path)
    child.start()
    child.join()
    (dead,), other = tmp_path.iterdir(), tmp_path / ".notes.tmp"
    other.write_bytes(b"somebody's")
    with files.draft(tmp_path) as (alive, _):
        assert files.orphans(tmp_path) == [] and not dead.exists()
        files.save(tmp_path / "kvq.safetensors", b"whole")
        assert alive.exists() and other.exists()


def test_a_draft_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not removed:
            removed.extend(files.orphans(tmp_path))
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    files.save(tmp_path / "kvq.safetensors", b"whole")
    assert removed and [path.name for path in tmp_path.iterdir()] == ["kvq.safetensors"]
