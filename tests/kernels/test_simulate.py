"""The simulated multiprocessor takes as long over small streams of instructions as one can count."""

from math import ceil

import pytest

pytest.importorskip("triton")
from machine_code import step, written

from benchmarks.simulate import LATENCY, simulate
from benchmarks.simulate import steps as steps_of

ALU = step("alu", 2)
LOAD = step("lsu", 2, 4, 512.0, LATENCY, sets=0)
USE = step(stall=1, waits=((0, 0),))


@pytest.mark.parametrize("programs", [1, 4, 8, 12])
def test_half_rate_instructions_bind(programs):
    """100 of them take two cycles each, for every warp of a scheduler in turn."""
    run = simulate([ALU] * 100, programs)
    assert run.each == pytest.approx(200 * max(1, programs / 4), rel=0.01)
    assert run.busy["alu"] == pytest.approx(min(1, programs / 4), rel=0.01)
    assert run.busy["issue"] == pytest.approx(min(1, programs / 4) / 2, rel=0.01)


def test_stalls_of_one_warp_are_filled_by_another():
    """An instruction every six cycles: two warps of a scheduler take no longer than one, eight are bound by issue."""
    passed = [step(stall=6)] * 50
    assert simulate(passed, 1).each == simulate(passed, 4).each == 300
    assert simulate(passed, 8).each == pytest.approx(300, rel=0.01)
    assert simulate(passed, 32).each == pytest.approx(400, rel=0.01)


def test_a_load_that_is_waited_for_takes_its_latency():
    """Ten in turn: ten latencies, each with the transfer and the cycle of the use; together, about one."""
    one = simulate([LOAD, USE] * 10, 1, rate=64.0)
    assert one.each == 10 * (512 / 64 + LATENCY + 1)
    together = simulate([LOAD] * 10 + [USE], 1, rate=64.0)
    assert together.each == pytest.approx(10 * 512 / 64 + LATENCY, abs=2)


def test_two_warps_hide_each_other():
    """A latency, then 40 instructions of ten cycles: two warps of a scheduler take as long as one."""
    passed = [LOAD, USE, *[step(stall=10)] * 40]
    alone, both = (simulate(passed, programs, rate=1e9) for programs in (1, 8))
    assert alone.each == 4 + LATENCY + 1 + 40 * 10
    assert both.each == pytest.approx(alone.each, rel=0.01)
    assert both.busy["issue"] == pytest.approx(8 * alone.busy["issue"], rel=0.01)


def test_the_units_work_of_all_warps_is_the_least_that_a_pass_takes():
    passed = [LOAD, USE, *[ALU] * 200]
    assert simulate(passed, 1, rate=1e9).each == pytest.approx(LATENCY + 400, abs=5)
    for programs in (8, 12, 16):
        each = simulate(passed, programs, passes=9, rate=1e9).each
        assert max(LATENCY + 400, 400 * programs / 4) <= each < LATENCY + 400 * programs / 4 + 5
    assert each == pytest.approx(1600, rel=0.05)  # four warps of a scheduler: one always has something to add


def test_memory_binds_when_enough_is_asked_for():
    passed = [LOAD] * 10 + [USE]
    run = simulate(passed, 16, passes=9, rate=16.0)
    assert run.each == pytest.approx(16 * 10 * 512 / 16, rel=0.01)
    assert run.busy["memory"] == pytest.approx(1, rel=0.01)


def test_all_schedulers_share_the_load_and_store_unit():
    shared = step("lsu", 2, 4, 0.0, 26)
    assert simulate([shared] * 100, 1).each == pytest.approx(400, rel=0.02)
    run = simulate([shared] * 100, 8)
    assert run.each == pytest.approx(8 * 400, rel=0.02) and run.busy["lsu"] == pytest.approx(1, rel=0.02)


def test_a_barrier_waits_for_the_last_warp():
    """A program of four warps, one of each scheduler; a program of one warp waits a little, too."""
    passed = [ALU] * 10 + [step(barrier=True)]
    assert simulate(passed, 1, warps=4, passes=5).each == pytest.approx(20 + 20, abs=2)
    assert simulate(passed, 1, warps=1, passes=5).each == pytest.approx(20 + 12, abs=2)
    uneven = simulate([LOAD, USE, step(barrier=True)], 1, warps=2, passes=5, rate=1.0)
    assert uneven.each == pytest.approx(2 * 512 + LATENCY + 20, abs=4)  # the second warp's bytes come last


def test_copies_ahead_are_not_waited_for():
    """Two groups in flight hide half of the latency each."""
    copy = step("lsu", 2, 4, 512.0, LATENCY, copies=True)
    group = step(groups=True)
    now, ahead = step(waits=((0, 0),)), step(waits=((0, 1),))
    assert simulate([copy, group, now], 1, passes=9, rate=1e9).each == pytest.approx(LATENCY, abs=10)
    assert simulate([copy, group, ahead], 1, passes=9, rate=1e9).each == pytest.approx(LATENCY / 2, abs=10)


def test_a_whole_kernel_ends_when_its_last_warp_does():
    run = simulate([LOAD, USE, ALU], 3, passes=1, rate=64.0)
    assert run.cycles == ceil(3 * 512 / 64) + LATENCY + 1


def test_instructions_become_steps():
    """Of a stream's bytes, what must be read at all is shared out over its loads."""
    passed = written(
        "IADD3 R4, R4, 0x200, RZ | 4",
        "LDG.E.128 R8, desc[UR4][R4.64] | 1 0",
        "LDG.E.U16 R12, desc[UR4][R4.64+0x80] | 0 1",
        "LDG.E R14, desc[UR4][R30.64] | 1 2",
        "LDS.64 R16, [R3] | 1 3",
        "HMMA.16816.F32 R20, R20, R24, RZ | 5 7 7 0x9",
        "MUFU.EX2 R1, R1 | 1 4",
        "BAR.SYNC.DEFER_BLOCKING 0x0 | 5",
    )
    add, codes, step16, table, shared, product, power, barrier = steps_of(passed, size=288.0)
    assert (add.unit, add.busy, add.stall) == ("alu", 2, 4)
    assert (codes.bytes, step16.bytes, table.bytes) == (256.0, 32.0, 0.0)
    assert (codes.wavefronts, codes.answers, codes.sets) == (4, LATENCY, 0)
    assert (step16.stall, table.answers, table.wavefronts) == (1, 38, 1)
    assert (shared.unit, shared.wavefronts, shared.answers) == ("lsu", 2, 26)
    assert (product.unit, product.waits) == ("tensor", ((0, 0), (3, 0)))
    assert (power.unit, power.busy) == ("xu", 8)
    assert barrier.barrier and not barrier.unit
    assert steps_of(passed, latency=300)[1].answers == 300 and steps_of(passed)[1].bytes == 512.0
