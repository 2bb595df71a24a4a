"""The blocks are cut into as many splits as fill the device, once for a cache."""

from types import SimpleNamespace

import pytest
import torch
from fused_driver import FAMILIES, Driver, with_kernels  # noqa: F401

pytest.importorskip("triton")
from kvq_runtime.geometry import Geometry
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import choose_splits, layout, resident_programs
from kvq_runtime.recipe import preset

H200 = SimpleNamespace(
    multi_processor_count=132, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472
)


def layouts(name: str, size: int = 128) -> list:
    recipe, geometry = preset(name), Geometry(1, 8, size)
    return [layout(recipe.scheme(0, role), recipe.window.block, geometry, role) for role in ("key", "value")]


@pytest.mark.parametrize(
    "name, size, programs",
    [
        ("rtn-2bit", 128, 12),  # 168 registers of 65536 / 32
        ("kivi-2bit", 128, 8),  # 256 registers
        ("lloyd-3bit", 256, 6),  # 37 KiB each of 228
        ("polar-3bit", 128, 4),  # two warps
    ],
)
def test_programs_of_a_multiprocessor(name, size, programs):
    assert resident_programs(*layouts(name, size), H200) == programs


@pytest.mark.parametrize("batch", [1, 4, 8, 64, 2112])
def test_splits_fill_the_device_and_need_no_second_round(batch, monkeypatch):
    keys, values = layouts("rtn-2bit")
    q = SimpleNamespace(shape=(batch, 32, 1, 128), is_cuda=True, device=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    cut, lines, places = choose_splits(q, keys, values, 1 << 20), 8 * batch, 132 * 12  # type: ignore[arg-type]
    assert cut == 1 or lines * cut <= places < lines * (cut + 1)
    assert choose_splits(q, keys, values, 3) <= 3  # type: ignore[arg-type]


def test_a_cache_chooses_once_by_the_room_that_it_has(monkeypatch):
    """So that a step that was recorded stays the step that is taken, however many tokens have come."""
    asked, cut = [], []

    def chosen(q, keys, values, blocks):
        asked.append(blocks)
        return 3

    def attended(*given):
        cut.append(given[7])
        return given[0], given[0][..., 0]

    monkeypatch.setattr(launch, "choose_splits", chosen)
    monkeypatch.setattr(launch, "attend", attended)
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(58, expected=False)
    for count in (1, 3, 1, 3):
        driver.step(count, expected=False)
    assert asked == [256 // FAMILIES["rtn-2bit"].window.block] * 2  # for one query token, and for three
    assert cut == [3] * 4
