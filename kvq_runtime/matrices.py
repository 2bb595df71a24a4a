"""Write a rotation, and the order in which a quantizer stores elements, as matrices that a codec multiplies with."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry


@lru_cache(maxsize=64)
def places(quantize, width: int, geometry: Geometry, device: torch.device) -> Tensor | None:
    """Where each element is among the decoded ones; None where it has kept its place."""
    order = quantize.order(width, geometry)
    return None if torch.equal(order, torch.arange(width)) else order.argsort().to(device)


@lru_cache(maxsize=64)
def matrices(
    rotate, quantize, width: int, geometry: Geometry, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The rotation before rounding (float32); and the rotation back (bfloat16), its rows in stored order."""
    order = quantize.order(width, geometry)
    if rotate is None and torch.equal(order, torch.arange(width)):
        return None, None
    turn = rotate.matrix(width, geometry) if rotate is not None else None
    period = _period(order)
    size = math.lcm(period, len(turn)) if turn is not None else period
    full = torch.block_diag(*[turn] * (size // len(turn))) if turn is not None else torch.eye(size)
    back = full.mT[order[:size]].to(device, torch.bfloat16).contiguous()
    return (turn.to(device) if turn is not None else None), back


def _period(order: Tensor) -> int:
    """The shortest run after which the stored order repeats itself."""
    width = len(order)
    for size in (n for n in range(1, width + 1) if width % n == 0):
        if torch.equal(
            order.view(-1, size) - torch.arange(0, width, size)[:, None], order[:size].expand(width // size, -1)
        ):
            return size
    return width
