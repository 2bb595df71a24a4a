"""Nothing torn, nothing lost: commands killed at every point and at any moment, on a full disk, before a power cut.

After each kill the registry opens, every version in it verifies, and none is half there; the same command again ends
with the same digests, and after `gc` nothing temporary is left: see `chaos.Case.recover`. KVQ_KILLS is how many are
killed at random moments, and how often a Hub fails at most; `make chaos` asks for more, for every passage of every
point, and for every way to fail of every request.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache

import chaos
import forked
import pytest
import tiny_artifact
import traced
from hub_client import TOKEN
from hub_server import Hub

from kvq_runtime.disk import files

KILLS = int(os.environ.get("KVQ_KILLS", "20"))
THOROUGH = KILLS > 20
SHARES = {"calibrate": 0.4, "publish another": 0.2, "push": 0.2, "pull": 0.1, "pull from a Hub": 0.1}  # of random kills
SLOW = {"calibrate", "calibrate by files"}  # one passage of each point is enough, but for `make chaos`
BOTH = ("calibrate by files",)  # the points of another command: `make chaos` disturbs each, too
POINTS = [name for name in chaos.COMMANDS if THOROUGH or name not in BOTH]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Iterator[Callable[[str], chaos.Case]]:
    with Hub() as hub:
        hub.users = {TOKEN: ("me", "write")}
        yield cache(lambda name: chaos.Case(name, tmp_path_factory.mktemp("chaos"), hub))


def alone(name: str, *marks: pytest.MarkDecorator):
    """A command as a parameter; one worker makes its case for all tests."""
    return pytest.param(name, marks=[pytest.mark.xdist_group(f"faults: {name}"), *marks])


QUICK = ("promote", "gc")  # of which `make test` kills every point


@pytest.fixture(params=[alone(name, *([pytest.mark.slow] if name in SLOW else [])) for name in chaos.COMMANDS])
def case(request, cases) -> chaos.Case:
    return cases(request.param)


def passages(case: chaos.Case) -> list[str]:
    """`point:n` for every point that the command passes; n drawn where one passage must do."""
    every = {point: range(1, count + 1) for point, count in case.passages.items()}
    if case.name in SLOW and not THOROUGH:
        draw = random.Random(0)
        every = {point: [draw.choice(numbers)] for point, numbers in every.items()}
    return [f"{point}:{n}" for point, numbers in every.items() for n in numbers]


def test_a_point_stands_in_every_gap(case):
    assert not traced.gaps(case.trace)


def test_written_then_synced_then_named_then_lasting(case):
    traced.Disk().play(case.trace)


@pytest.mark.parametrize(
    "case", [alone(name, *([] if name in QUICK else [pytest.mark.slow])) for name in POINTS], indirect=True
)
def test_killed_at_every_point(case, record_property):
    wanted = passages(case)
    assert [case.disturb(fault).code for fault in wanted] == [-9] * len(wanted)
    record_property("kvq", f"{case.name}: {len(wanted)} kills at {len(case.passages)} points")


@pytest.mark.slow
def test_killed_at_any_moment(case, record_property):
    share, late, draw = round(KILLS * SHARES.get(case.name, 0)), 0, random.Random(case.name)
    for _ in range(share):
        latest = case.undisturbed.seconds
        while case.disturb(kill_after=(moment := draw.uniform(0, latest))).code != -9:
            late, latest = late + 1, moment  # it ends sooner than it did undisturbed
            assert latest > 1e-9, "the command ends before it can be killed"
    record_property("kvq", f"{case.name}: {share} kills at random moments, {late} came too late")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*map(alone, POINTS)], indirect=True)
def test_a_full_disk_at_every_point(case, record_property):
    wanted = passages(case)
    for fault in wanted:
        ended = case.disturb(f"{fault}:full")
        assert "No space left on device" in ended.output if ended.code else case.name in chaos.ON_A_HUB, (
            f"{fault}: {ended.output}"
        )
        assert ended.code in (0, 1)  # 0: a cache that cannot be written to forgets
        assert "Traceback" not in ended.output
    record_property("kvq", f"{case.name}: {len(wanted)} times a full disk")


def failures(case: chaos.Case) -> list[tuple[str, str, int, dict]]:
    """Every way in which the Hub can fail at each request of a command, once and for good; some where some must do."""
    every = []
    for request in case.requests:
        ways = [
            ("status", {"status": 429, "Retry_After": "1"}),
            ("status", {"status": 500}),
            ("reset", {}),
            ("lost", {}),
        ]
        if re.match("GET .*(/resolve/|/lfs/)", request):  # what comes back is a file
            ways += [("short", {}), ("flip", {}), ("drip", {})]
        every += [
            (request, kind, times, more) for kind, more in ways for times in (1, 1000) if kind != "drip" or times == 1
        ]
    return every if THOROUGH else random.Random(case.name).sample(every, KILLS // len(chaos.ON_A_HUB))


@pytest.mark.slow
@pytest.mark.parametrize("name", [alone(name) for name in chaos.ON_A_HUB])
def test_a_hub_that_fails(name, cases, record_property):
    case, happened, refused = cases(name), 0, 0
    wanted = failures(case)
    for request, kind, times, more in wanted:
        ended, count = case.trouble(request, kind, times, **more)
        assert ended.code in (0, 1), f"{kind} {request}: {ended.output}"
        assert "Traceback" not in ended.output and count, f"{kind} {request}: {ended.output}"
        assert ended.code == 0 or times > 1, f"one {kind} at {request} was not lived through: {ended.output}"
        happened, refused = happened + count, refused + ended.code
    told = f"{len(wanted)} ways of a Hub to fail, {happened} failures, {refused} times the command gave up and said so"
    record_property("kvq", f"{name}: {told}")


@pytest.mark.slow
def test_every_point_of_the_code_is_passed(cases):
    """What the tests above visit is all there is."""
    written = chaos.points_in_the_code()
    assert len(written) == len(set(written)), "a name is used twice"
    passed = {point for name in chaos.COMMANDS for point in cases(name).passages}
    assert passed == set(written)


@pytest.mark.slow
def test_a_short_write_is_a_full_disk_too(cases, record_property):
    """The system cuts a write in the middle, whoever writes; RLIMIT_FSIZE stands for the disk."""
    refused = 0
    for name in ("calibrate", "publish another", "pull", "pull from a Hub"):
        for size in (0, 1, 100, 1000, 5000):
            ended = cases(name).disturb(limit=size)
            assert ended.code in (0, 1) and "Traceback" not in ended.output, ended.output
            refused += ended.code
    assert refused >= 12
    record_property("kvq", f"{refused} times a write cut short")


def test_without_the_variable_a_point_does_nothing(monkeypatch):
    monkeypatch.delenv("KVQ_FAULT", raising=False)
    files.fault_point("draft.begun")
    monkeypatch.setenv("KVQ_FAULT", "another:1:full")
    files.fault_point("draft.begun")
    monkeypatch.setenv("KVQ_FAULT", "draft.begun:1:full")
    with pytest.raises(OSError, match="No space left"):
        files.fault_point("draft.begun")


def test_the_checks_would_see_a_torn_state(tmp_path):
    """A draft named before it is synced, an event before its blob lasts, a file that is lost, a torn version."""
    disk = lambda *steps: traced.Disk().play([list(step) for step in steps])  # noqa: E731
    draft, blob, event = (f"{tmp_path}/{name}" for name in ("tmp/.1.tmp", "blobs/a", "events/1.json"))
    good = [("write", draft), ("sync", draft), ("name", draft, blob), ("sync", f"{tmp_path}/blobs")]
    disk(*good)
    for missing, message in ((1, "named before it is synced"), (3, "a power cut would take")):
        with pytest.raises(AssertionError, match=message):
            disk(*good[:missing], *good[missing + 1 :])
    with pytest.raises(AssertionError, match="may be lost"):
        disk(*good[:3], ("write", draft), ("sync", draft), ("link", draft, event))
    assert traced.gaps([["write", draft], ["sync", draft]]) and not traced.gaps(
        [["write", draft], ["point", "x"], ["sync", draft]]
    )
    registry = chaos.store(tmp_path)
    path = registry.blob(registry.publish(chaos.NAME, tiny_artifact.data()).sha256)
    chaos.observe(tmp_path)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="truncated"):
        chaos.observe(tmp_path)


def test_a_draft_beside_a_file_is_removed_when_its_process_is_dead(tmp_path):
    child = forked.process(forked.leave_draft, tmp_path)
    child.start()
    child.join()
    (dead,) = tmp_path.iterdir()
    (other := tmp_path / ".notes.tmp").write_bytes(b"half")
    with files.draft(tmp_path) as (alive, _):
        files.save(tmp_path / "kvq.safetensors", b"whole")
        assert not dead.exists() and alive.exists() and other.exists()


def test_a_draft_of_another_machine_is_removed_only_when_it_is_old(tmp_path):
    """Its process cannot be asked for here, whatever has its number."""
    child = forked.process(lambda: None)
    child.start()
    child.join()
    theirs = [tmp_path / f".{number}-{'a' * 16}.tmp" for number in (child.pid, os.getpid())]
    for path in theirs:
        path.write_bytes(b"half")
    files.save(tmp_path / "kvq.safetensors", b"whole")
    assert all(path.exists() for path in theirs)
    for path in theirs:
        os.utime(path, (0, time.time() - files.GRACE))
    files.save(tmp_path / "kvq.safetensors", b"whole")
    assert not any(path.exists() for path in theirs)
