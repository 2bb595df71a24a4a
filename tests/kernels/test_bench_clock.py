"""How the GPU benchmark times: cold caches for both sides, no launch in a time; on a device that stands in for one."""

from types import SimpleNamespace

import pytest
import torch
from stand_in import Device, Hands

pytest.importorskip("triton")
from benchmarks import baselines, cases, clock, measure

SAMPLE = ["write", "read", "spin", "begin", "call", "end"]


def test_every_sample_is_cold_and_queued_behind_a_spin(monkeypatch):
    device = Device([30.0, 10.0, 20.0, 40.0, 50.0]).use(monkeypatch)
    found = clock.timed(lambda: device.do("call"), repeats=5)
    assert device.did == ["call"] * 2 + SAMPLE * 5
    assert (found.low, found.median, found.high) == pytest.approx((20.0, 30.0, 40.0))
    assert found.row() == {"microseconds": 30.0, "low": 20.0, "high": 40.0}


def test_what_waits_for_the_device_is_not_captured(monkeypatch):
    device = Device().use(monkeypatch)

    def call() -> None:
        device.do(device.waiting_is)
        if device.waiting_is == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        clock.timed(call)
    assert device.did == ["default", "error"] and device.waiting_is == "default"
    assert clock.timed(call, graph=False).median == pytest.approx(10.0)


def test_a_sample_that_waited_for_its_launch_is_left_out(monkeypatch):
    device = Device([900.0, 800.0, 10.0], late=2).use(monkeypatch)
    found = clock.timed(lambda: device.do("call"), repeats=4, graph=False)
    assert (found.median, found.high, found.late) == (pytest.approx(10.0), pytest.approx(10.0), 2)
    assert device.spins == [clock.SPIN, 2 * clock.SPIN, *[4 * clock.SPIN] * 4]


def test_a_host_that_is_always_late_is_told(monkeypatch):
    device = Device([7.0], late=1000).use(monkeypatch)
    found = clock.timed(lambda: device.do("call"), repeats=4)
    assert (found.late, len(device.spins)) == (8, 8)
    assert found.median == pytest.approx(7.0) and max(device.spins) <= clock.LONGEST
    assert found.row()["late"] == 8


@pytest.mark.parametrize("l2, least", [(60 << 20, 256 << 20), (126 << 20, 504 << 20)])
def test_more_is_written_than_any_cache_holds(l2, least, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=l2))
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: made.append(count * dtype.itemsize))
    clock.scratch.__wrapped__()
    assert made == [least]


@pytest.fixture
def compared(monkeypatch):
    """A case measured beside two baselines and one that fails, on the stand-in: (device, line)."""
    device = Device([20.0]).use(monkeypatch)
    case = cases.Case(cases.MODELS[0], "kivi-2bit-g128", 4096, 1)

    def theirs(case, where):
        yield "flash", lambda: device.do("flash")
        yield "cudnn", lambda: device.do("cudnn")

    def refused(case, where):
        raise ImportError("made for another version")
        yield

    monkeypatch.setattr(baselines, "FOUND", (theirs, refused))
    monkeypatch.setattr(measure, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(measure, "built", lambda case, where: lambda q: device.do("ours"))
    attention = measure.Attention(clock.Rates(copy=4.0e12, read=3.0e12, product=8e14, floor=2.0))
    return device, attention, case, attention.measure(case)


def test_caches_are_cold_for_both_sides(compared):
    device, _, _, line = compared
    for name in ("ours", "flash", "cudnn"):
        at = [i for i, what in enumerate(device.did) if what == name and device.did[i - 1] == "begin"]
        assert len(at) == clock.REPEATS
        assert all(device.did[i - 4 : i + 2] == ["write", "read", "spin", "begin", name, "end"] for i in at)
    assert line["baselines"]["refused"] == "ImportError: made for another version"


def test_a_line_has_shares_of_the_measured_bandwidth(compared):
    _, _, case, line = compared
    assert line["speed_up"] == 1.0 and line["baseline"] in ("flash", "cudnn")
    assert line["bandwidth_share"] == pytest.approx((case.packed() + case.exact()) / 20e-6 / 4e12, abs=1e-3)
    assert line["baseline_share"] == pytest.approx(case.dense() / 20e-6 / 4e12, abs=1e-3)


def test_baselines_of_a_shape_are_timed_once_in_a_run(compared):
    device, attention, case, _ = compared
    before = device.did.count("flash")
    attention.measure(cases.Case(case.model, "rtn-2bit", case.tokens, case.batch))
    assert device.did.count("flash") == before
    attention.measure(cases.Case(case.model, "rtn-2bit", 2048, case.batch))
    assert device.did.count("flash") == 2 * before


def test_a_device_that_does_not_tell_its_clock(compared, monkeypatch):
    device, attention, case, line = compared
    assert set(line["bounds"]) == {"bytes", "products"}
    known = SimpleNamespace(major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000)
    monkeypatch.setattr(device, "get_device_properties", lambda index=None: known)
    bounds = attention.measure(case)["bounds"]
    counts = measure.counted(f"attend {case.recipe}", 90)
    cycles = 2 * case.blocks * 128 * 1024 / 132  # elements of a multiprocessor, times lanes
    wavefronts = sum(float(counts[f"{where}_wavefronts_per_element"]) for where in ("shared", "global", "gather"))
    for name, each in (
        ("instructions", float(counts["instructions_per_element"]) / 128),
        ("alu", float(counts["alu_per_element"]) / 64),
        ("lsu", wavefronts / 32),
    ):
        assert bounds[name] == pytest.approx(cycles * each / 1980, abs=0.06) and bounds[name] > 0


def test_instructions_are_those_of_the_triton_in_use(monkeypatch, tmp_path):
    """Of two rows the one that was counted with it, or else the newest; none without a main loop."""
    rows = ["3.6.0,attend a,90,3.5", "3.9.0,attend a,80,9", "3.9.0,attend a,90,3.1", "3.9.0,merge,90,"]
    (tmp_path / "kernels_aot.csv").write_text("\n".join(["triton,kernel,arch,instructions_per_element", *rows]))
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    for version, wanted in (("3.6.0", "3.5"), ("3.9.0", "3.1"), ("4.0.0", "3.1")):
        monkeypatch.setattr(measure.triton, "__version__", version)
        assert measure.counted("attend a", 90)["instructions_per_element"] == wanted
    assert measure.counted("attend b", 90) == {} and measure.counted("merge", 90) == {}


def test_a_deadline(monkeypatch):
    hands = Hands(monkeypatch)
    whole = clock.Deadline(100)
    hands.now = 40.0
    part = whole.part(0.5)
    assert (whole.left, part.left) == (60.0, 30.0)
    hands.now = 90.0
    assert (whole.left, part.left) == (10.0, 0.0)
