"""Padding that is looked at step by step, the newest slot alone, is what a look at all slots finds."""

import itertools

import pytest
import torch

from kvq_runtime.attention.fused import LeftPadding
from kvq_runtime.store.positions import Positions

CPU = torch.device("cpu")
STARTS = [torch.tensor([0, 0]), torch.tensor([3, 0]), torch.tensor([8, 0])]  # the last begins with a step


def announced(positions: Positions, real_BT: torch.Tensor, places_BT: torch.Tensor | None, count: int) -> None:
    """The newest tokens."""
    places = None if places_BT is None else places_BT[:, -count:]
    positions.announce(real_BT[:, -count:], places, None)
    positions.extend(2, count, CPU)


@pytest.mark.parametrize("hole, jump, placed", [*itertools.product([None, 8, 9], [None, 8, 10], [True, False])])
@pytest.mark.parametrize("starts", STARTS, ids=["whole", "padded", "late"])
def test_steps_find_what_a_look_at_everything_finds(starts, hole, jump, placed):
    real_BT = torch.arange(12) >= starts[:, None]
    if hole is not None:
        real_BT[1, hole] = False
    places_BT = (torch.arange(12) - starts[:, None]).clamp(min=0)
    if jump is not None:
        places_BT[:, jump:] += 5
    positions = Positions()
    padding, told = LeftPadding(positions), []
    for first, last in ((0, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
        announced(positions, real_BT[:, :last], places_BT[:, :last] if placed else None, last - first)
        told.append(padding.look(2, last - first, CPU))
        fresh = LeftPadding(positions)
        fresh.look(2, last - first, CPU)
        assert torch.equal(padding.starts_B, fresh.starts_B)
        assert (padding.real, padding.counted) == (fresh.real, fresh.counted)
    if hole is None and (jump is None or not placed) and starts[0] < 8:
        assert told == [True, False, False, False, False, False]
