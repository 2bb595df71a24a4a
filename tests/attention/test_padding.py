"""Padding that is looked at step by step is what a first look at all slots finds."""

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


@pytest.mark.parametrize("hole, jump, placed", [(None, None, True), (None, 8, True), (8, None, True), (9, 10, False)])
@pytest.mark.parametrize("starts", STARTS, ids=["whole", "padded", "late"])
def test_steps_find_what_a_look_at_everything_finds(starts, hole, jump, placed):
    real_BT = torch.arange(12) >= starts[:, None]
    if hole is not None:
        real_BT[1, hole] = False
    places_BT = (torch.arange(12) - starts[:, None]).clamp(min=0)
    if jump is not None:
        places_BT[:, jump:] += 5
    positions = Positions()
    padding = LeftPadding(positions)
    for first, last in ((0, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
        announced(positions, real_BT[:, :last], places_BT[:, :last] if placed else None, last - first)
        padding.look(2, last - first, CPU)
        fresh = LeftPadding(positions)
        fresh.look(2, last - first, CPU)
        assert torch.equal(padding.starts_B, fresh.starts_B)
        assert (padding.real, padding.counted) == (fresh.real, fresh.counted)
