"""Write a vector as a radius and angles, recursively: neighbours (a, b) become their length and their angle.

    level 1      r = √(x₁² + x₂²),  ψ = atan2(x₂, x₁) in [0, 2π)
    level l > 1  the same with the lengths of two neighbours of the level below, so ψ in [0, π/2]

After L levels a run of 2^L coordinates is one radius and 2^L - 1 angles. For Gaussian vectors the angles are
independent, with density ∝ sin(2ψ)^(2^(l-1) - 1) above level 1, where they are uniform; so their codebooks are known
exactly. An angle decodes to a point (cos, sin): of its centroid, or the mean point of its cell, which is shorter
and has the least squared error.

Source: Han et al., 2025 (PolarQuant), definition 1, lemma 2, algorithm 1.
Differs: no angle is computed. b·cos t > a·sin t says on which side of the boundary t it lies, with products and
comparisons alone, which round in the same way on every machine.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch, lloyd
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import pack
from kvq_runtime.ops.rotation import Rotation, rotate

Points = Literal["unit", "mean"]


@constant(64)
def _density(level: int) -> Tensor:
    """Return the density of the angle above level 1 on [0, π/2], float64, at the middles of lloyd.CELLS steps."""
    return (2 * _middles()).sin() ** (2 ** (level - 1) - 1)


def _middles() -> Tensor:
    return (torch.arange(lloyd.CELLS, dtype=torch.float64) + 0.5) * (math.pi / 2 / lloyd.CELLS)


@constant(64)
def codebook(level: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return the boundaries inside the range and the centroids of a level, float64. Cell 0 of level 1 begins at 0."""
    check(level, bits)
    if level > 1:
        return lloyd.solve(0, math.pi / 2, _density(level), bits)
    step = 2 * math.pi / 2**bits
    return step * torch.arange(1, 2**bits, dtype=torch.float64), step * (
        torch.arange(2**bits, dtype=torch.float64) + 0.5
    )


def check(level: int, bits: int) -> None:
    """ValueError unless a level, from 1, has a codebook of `bits` bits: 2 to 6 at level 1, 1 to 4 above."""
    least, most = (2, 6) if level == 1 else (1, 4)
    if not least <= bits <= most:
        raise ValueError(f"bits={bits} at level {level}; use {least} to {most}")


@constant(128)
def points(level: int, bits: int, kind: Points) -> Tensor:
    """Return what each code of a level decodes to: (cos, sin) float64 [2^bits, 2]."""
    boundaries, centroids = codebook(level, bits)
    circle = torch.stack([centroids.cos(), centroids.sin()], 1)
    if kind == "unit":
        return circle
    if level == 1:
        half = math.pi / 2**bits
        return circle * math.sin(half) / half
    density, middles = _density(level), _middles()
    places = boundaries * (lloyd.CELLS / (math.pi / 2))
    mass, *moments = (lloyd.running(density * part) for part in (1, middles.cos(), middles.sin()))
    return torch.stack([lloyd.cell_means(places, mass, moment) for moment in moments], 1)


@dispatch.paired("polar.encode")
def encode(
    x: Tensor, bits: Sequence[int], rotation: Rotation = None, boundaries: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate vectors [..., K] of any float dtype, and encode them in L = len(bits) levels; K is a multiple of 2^L.

    bits         of a code, of each level: 2 to 6 of the first, 1 to 4 of the others
    boundaries   rising angles [2^bits - 1] of each level instead of the exact codebook's; see `angles`

    Returns codes, packed as in `pack_levels`, uint8 [..., bytes], and radii as root mean squares, float16 [..., K/2^L].
    """
    codes, radii = angles(rotate(x, rotation), bits, boundaries)
    return pack_levels(codes, bits), (radii / 2 ** (len(bits) / 2)).half()


def angles(x: Tensor, bits: Sequence[int], boundaries: Sequence[Tensor] | None = None) -> tuple[list[Tensor], Tensor]:
    """Return the cells of the angles of float32 [..., K]: codes uint8 [..., K/2^l] of each level l, radii [..., K/2^L].

    boundaries   inside (0, 2π) at level 1, where cell 0 begins at 0, and inside (0, π/2) above it
    """
    codes = []
    for level, width in enumerate(bits, start=1):
        a, b = x[..., 0::2], x[..., 1::2]
        if level > 1:
            cuts = codebook(level, width)[0] if boundaries is None else boundaries[level - 1]
            codes.append(_quarter(a, b, cuts))
        else:
            codes.append(_whole(a, b, width) if boundaries is None else _circle(a, b, boundaries[0]))
        x = (a * a + b * b).sqrt_()
    return codes, x


def pack_levels(codes: Sequence[Tensor], bits: Sequence[int]) -> Tensor:
    """Pack the codes of all levels, [..., K/2^l] each, those of `runs` together: uint8 [..., bytes]."""
    packed, first = [], 0
    for wide, counts in runs(2 * codes[0].shape[-1], tuple(bits)):
        packed.append(pack(torch.cat(list(codes[first : first + len(counts)]), -1), wide))
        first += len(counts)
    return torch.cat(packed, -1)


def _quarter(a: Tensor, b: Tensor, boundaries: Tensor) -> Tensor:
    """Count the boundaries, all inside [0, π/2], that the angle of (a, b) lies beyond; a, b ≥ 0."""
    codes = torch.zeros(a.shape, dtype=torch.uint8, device=a.device)
    for angle in boundaries.tolist():
        codes += b * math.cos(angle) > a * math.sin(angle)
    return codes


def _whole(x: Tensor, y: Tensor, bits: int) -> Tensor:
    """Return the number of the sector, of 2^bits equal ones, that (x, y) lies in: the quadrant, then the part of it."""
    up, right = y >= 0, x >= 0
    quadrant = torch.where(up, (~right).to(torch.uint8), 2 + right.to(torch.uint8))
    odd = up != right
    a, b = torch.where(odd, y, x).abs_(), torch.where(odd, x, y).abs_()
    inside = 2 ** (bits - 2)
    return quadrant * inside + _quarter(a, b, codebook(1, bits)[0][: inside - 1])


def _circle(x: Tensor, y: Tensor, boundaries: Tensor) -> Tensor:
    """Count the boundaries, anywhere inside (0, 2π), that the angle of (x, y) lies beyond."""
    codes, lower = torch.zeros(x.shape, dtype=torch.uint8, device=x.device), y < 0
    for angle in boundaries.tolist():
        beyond = y * math.cos(angle) > x * math.sin(angle)  # inside a half of the circle
        codes += lower | beyond if angle < math.pi else lower & beyond
    return codes


def runs(size: int, bits: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Return levels that are packed together, for having the same bits: (bits, codes of each level)."""
    levels = groupby(enumerate(bits, start=1), key=lambda level: level[1])
    return [(wide, [size >> level for level, _ in run]) for wide, run in levels]


def decode(codes: Sequence[Tensor], radii: Tensor, points: Sequence[Tensor]) -> Tensor:
    """Decode unpacked codes [..., K/2^l] of each level l, and radii [..., K/2^L], to float32 [..., K].

    points   (cos, sin) that a code decodes to, float32 [2^bits, 2] of each level
    """
    x = radii.float()
    for index, table in zip(reversed(codes), reversed(points), strict=True):
        # as one 64-bit word each: a gather of words is several times faster than one of pairs
        words = table.view(torch.int64).squeeze(-1).index_select(0, index.flatten().int())
        pairs = words.view(torch.float32).view(*index.shape[:-1], 2 * index.shape[-1])
        x = pairs.mul_(x.repeat_interleave(2, -1))
    return x


@constant(128)
def points_on(device: torch.device, level: int, bits: int, kind: Points) -> Tensor:
    """Return `points`, float32 on a device."""
    return points(level, bits, kind).to(device, torch.float32).contiguous()
