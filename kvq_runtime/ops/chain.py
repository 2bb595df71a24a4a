"""Encode in one go: rotate runs of elements, scale, find codes, pack. On a GPU each of these is one launch.

turn    what runs of elements are multiplied with before, or None: `Signed` (a signed Hadamard) or a float32 matrix
x       groups [..., K] that share a scale, in any layout; K a multiple of the rotation's size

Returns codes packed, uint8 [..., bytes], and the group's scales [...]; see rtn.py, grid.py, lloyd.py for the formulas.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch, grid, hadamard, lloyd, polar, rtn
from kvq_runtime.ops.pack import pack


class Signed(NamedTuple):
    """A signed Hadamard rotation, as `hadamard.matrix` makes it."""

    size: int
    seed: int


Turn = Signed | Tensor | None


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Rotate runs along the last dimension."""
    if turn is None:
        return x
    if isinstance(turn, Signed):
        return hadamard.rotate(x, turn.size, turn.seed)
    return (x.reshape(-1, len(turn)) @ turn).view(x.shape)


@dispatch.paired
def minmax(x: Tensor, bits: int, turn: Turn = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, step and low of rounding between a group's ends."""
    codes, step, low = rtn.encode_minmax(turned(x, turn), bits)
    return pack(codes, bits), step, low


@dispatch.paired
def absmax(x: Tensor, bits: int, turn: Turn = None) -> tuple[Tensor, Tensor]:
    """Codes and step of symmetric rounding."""
    codes, step = rtn.encode_absmax(turned(x, turn), bits)
    return pack(codes, bits), step


@dispatch.paired
def nearest(x: Tensor, dim: int, size: int, turn: Turn = None) -> tuple[Tensor, Tensor]:
    """Codes and scale of the nearest point of a grid."""
    codes, scale = grid.encode(turned(x, turn), dim, size)
    return pack(codes, size.bit_length() - 1), scale


@dispatch.paired
def sphere(
    x: Tensor, bits: int, scale: Literal["plain", "norm", "least_squares"], turn: Turn = None
) -> tuple[Tensor, Tensor]:
    """Codes and scale of the codebook of a sphere's coordinates; the scales are those of stages/lloyd.py."""
    x = turned(x, turn)
    codes, found = lloyd.encode(x, bits)
    if scale != "plain":
        chosen = lloyd.decode(codes, torch.ones_like(found), bits).bfloat16().float()  # as they are looked up
        norm = torch.linalg.vector_norm(chosen, dim=-1)
        found = found * x.shape[-1] ** 0.5 / norm if scale == "norm" else torch.linalg.vecdot(x, chosen) / norm.square()
    return pack(codes, bits), found.half()


@dispatch.paired
def angles(
    x: Tensor, bits: Sequence[int], turn: Turn = None, boundaries: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Codes of angles, levels of the same bits packed together, and radii float16, as root mean squares."""
    x = turned(x, turn)
    codes, radii = polar.encode(x, bits) if boundaries is None else polar.encode_fitted(x, boundaries)
    packed, first = [], 0
    for wide, counts in polar.runs(x.shape[-1], tuple(bits)):
        packed.append(pack(torch.cat(codes[first : first + len(counts)], -1), wide))
        first += len(counts)
    return torch.cat(packed, -1), (radii / 2 ** (len(bits) / 2)).half()
