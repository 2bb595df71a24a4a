"""The blocks are cut into as many splits as fill the device, once for a cache."""

from types import SimpleNamespace

import pytest
from fused_driver import FAMILIES, Driver, with_kernels  # noqa: F401

pytest.importorskip("triton")
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import count_splits, resident_programs

H200 = SimpleNamespace(
    multi_processor_count=132, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    max_threads_per_multi_processor=2048,
)  # fmt: skip


@pytest.mark.parametrize(
    "registers, shared, warps, programs",
    [
        (255, 18432, 1, 8),  # 256 of 65536 / 32
        (168, 0, 1, 12),
        (197, 18432, 2, 5),  # 200, in eights
        (64, 100_000, 4, 2),  # two of 101024 bytes in 233472
        (32, 1024, 1, 32),  # as many as there ever are
        (32, 0, 16, 4),  # 2048 threads
        (255, 0, 16, 1),
    ],
)
def test_programs_of_a_multiprocessor(registers, shared, warps, programs):
    assert resident_programs(registers, shared, warps, H200) == programs


@pytest.mark.parametrize("lines", [1, 4, 8, 20, 64, 100, 512, 1056, 2112, 9000])
@pytest.mark.parametrize("programs", [1, 5, 8, 12])
def test_splits_fill_the_device_and_need_no_second_round(lines, programs):
    cut, places = count_splits(lines, 1 << 20, 132, programs), 132 * programs
    assert cut == 1 or lines * cut <= places < lines * (cut + 1)
    assert count_splits(lines, 3, 132, programs) <= 3


def test_one_row_is_cut_into_more_than_128():
    assert count_splits(8, 1024, 132, 8) == 132


def test_a_cache_chooses_once_by_the_room_that_it_has(monkeypatch):
    """So that a step that was recorded stays the step that is taken, however many tokens have come."""
    asked, cut, choose, attend = [], [], launch.choose_splits, launch.attend

    def chosen(*given):
        asked.append(given[6])
        return choose(*given)

    def attended(*given):
        cut.append(given[7])
        return attend(*given)

    monkeypatch.setattr(launch, "choose_splits", chosen)
    monkeypatch.setattr(launch, "attend", attended)
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(58, expected=False)
    before = driver.cache.layers[0].blocks
    for count in (1, 3, 1, 3, 1):
        driver.step(count, expected=False)
    block = FAMILIES["rtn-2bit"].window.block
    assert asked == [256 // block] * 2  # for one query token, and for three
    assert len(cut) == 5 and len({*cut[::2]}) == 1
    assert driver.cache.layers[0].blocks > before


@pytest.mark.gpu
def test_the_compiled_kernel_is_asked():
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(58, expected=False)
    driver.check()
