"""Codes in the order of the tensor core's operand: where each one lies, and back again."""

import pytest
import torch
from tiers import some

from kvq_runtime.ops import fragment

SIZES = [(block, size) for block in (16, 32, 128) for size in (64, 80, 96, 128, 256)]
CASES = [(bits, *one) for bits in (1, 2, 3, 4, 8) for one in SIZES if fragment.order(bits, *one)]


def test_what_has_an_order():
    """Blocks of 128 tokens do for every width of bits and every common head."""
    assert {(bits, size) for bits, block, size in CASES if block == 128} == {
        (bits, size) for bits in (1, 2, 3, 4, 8) for size in (64, 80, 96, 128, 256)
    }
    for given in ((5, 128, 128), (2, 48, 128), (2, 128, 40), (2, 16, 16), (1, 32, 80)):
        assert fragment.order(*given) is None
    assert fragment.order(2, 128, 80, groups=2) is None  # 2.5 tiles a group


@pytest.mark.parametrize("bits, block, size", CASES)
@pytest.mark.parametrize("rows", ["tokens", "channels"])
def test_there_and_back_in_as_many_bytes(bits, block, size, rows):
    order = fragment.order(bits, block, size)
    assert order is not None
    codes = torch.randint(0, 1 << bits, (2, 3, block, size), dtype=torch.uint8)
    ordered = fragment.arrange(codes, order, rows)
    assert ordered.shape == (2, 3, block * size * bits // 8)
    assert torch.equal(fragment.collect(ordered, order, rows), codes)


@pytest.mark.parametrize("case", some(CASES, CASES[0], (3, 128, 80), (2, 128, 128), (8, 128, 64)), ids=str)
@pytest.mark.parametrize("rows", ["tokens", "channels"])
def test_a_lane_finds_its_share_of_the_operand(case, rows):
    """Computed from PTX's description of mma.m16n8k16: lane l holds a0 to a7 of A at row l / 4 (+ 8 for a2, a3, a6, a7)
    and column l % 4 · 2 + i % 2 (+ 8 from a4 on)."""
    (bits, block, size), order = case, fragment.order(*case)
    assert order is not None
    codes = torch.randint(0, 1 << bits, (block, size), dtype=torch.uint8)
    ordered = fragment.arrange(codes, order, rows).tolist()
    drawn = torch.Generator().manual_seed(0)
    for _ in range(200):
        lane, i, sub, tile = (
            int(torch.randint(0, most, (), generator=drawn)) for most in (32, 8, order.SUBS, order.TILES)
        )
        run = order.RUNS[int(torch.randint(0, len(order.RUNS), (), generator=drawn))]
        step = int(torch.randint(0, run.COUNT, (), generator=drawn))
        row, column = lane // 4 + 8 * (i % 4 // 2), lane % 4 * 2 + i % 2 + 8 * (i // 4)
        token, channel = (row, column) if rows == "tokens" else (column, row)
        wanted = codes[(sub * order.TILES + tile) * 16 + token, (run.FIRST + step * run.STEP) * 16 + channel]
        at, found = i % 2 + 2 * (i // 4) + 4 * (i % 4 // 2), 0  # h, w, r
        for plane in run.PLANES:
            words = order.WORDS[plane.WORDS]
            size_of = words.BITS // 8
            first = sub * order.BYTES + words.START + step * words.STRIDE + (8 * lane + at) * size_of
            container = int.from_bytes(bytes(ordered[first : first + size_of]), "little")
            found |= (container >> plane.WIDTH * (plane.SLOT + tile) & (1 << plane.WIDTH) - 1) << plane.UP
        assert found == wanted
