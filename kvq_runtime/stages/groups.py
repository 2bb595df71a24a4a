"""Resolve a quantizer's group setting to a number of channels (or of tokens, when it works per channel)."""

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry


def check(group: str | int) -> None:
    """Raise a ValueError for a group setting that no geometry allows."""
    if isinstance(group, str) and group not in ("all", "head"):
        raise ValueError(f'group={group!r}; use "all", "head" or a whole number')
    if isinstance(group, bool) or (isinstance(group, int) and group < 1):
        raise ValueError(f"group={group!r}; use at least 1")


def size(group: str | int, width: int, geometry: Geometry) -> int:
    """Elements per group in vectors of `width`; "all" is the largest power of two, at most 1024, that divides it."""
    if group == "head" and width == geometry.width:
        return geometry.head_size
    if isinstance(group, str):
        return min(width & -width, 1024)
    if width % group:
        fitting = [n for n in range(1, width + 1) if width % n == 0]
        raise ValueError(f"group={group} does not divide {width}; use one of {fitting}")
    return group


def scaled(x_NRW: Tensor, scale_NRG: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply each of the G groups by its scale, in float32 (on a CPU several times faster than in bfloat16)."""
    x = x_NRW.to(torch.float32, copy=True) if out is None else out.copy_(x_NRW)
    x.unflatten(-1, (scale_NRG.shape[-1], -1)).mul_(scale_NRG.float()[..., None])
    return x
