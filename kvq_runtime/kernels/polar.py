"""Split vectors into radii and angles, level by level in registers, and put them together again; see ops/polar.py.

BITS holds the width of every level in three bits each, the first level lowest.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import on, programs, rows_of, strided
from kvq_runtime.ops import polar


def encode(x: Tensor, bits: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    return _launch(x, bits, _quarters(tuple(bits), x.device), False)


def encode_fitted(x: Tensor, boundaries: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    bits = [len(level).bit_length() for level in boundaries]
    padded = torch.stack([torch.nn.functional.pad(level.double(), (0, 63 - len(level))) for level in boundaries])
    lines = torch.stack([padded.cos(), padded.sin(), (padded < math.pi).double()], 2).float()
    return _launch(x, bits, lines.to(x.device), True)


@lru_cache(maxsize=32)
def _quarters(bits: tuple[int, ...], device: torch.device) -> Tensor:
    """(cos, sin, 1) of the boundaries inside a quarter circle, of every level, float32 [levels, 63, 3]."""
    table = torch.ones(len(bits), 63, 3, dtype=torch.float64)
    for level, width in enumerate(bits, start=1):
        angles = polar.codebook(level, width)[0]
        angles = angles[: 2 ** (width - 2) - 1] if level == 1 else angles
        table[level - 1, : len(angles), :2] = torch.stack([angles.cos(), angles.sin()], 1)
    return table.float().to(device)


def table(points: Sequence[Tensor]) -> Tensor:
    """(cos, sin) that every code decodes to, of every level, float32 [levels, 2, 64]."""
    return torch.stack([torch.nn.functional.pad(level.float().mT, (0, 64 - len(level))) for level in points])


def widths(bits: Sequence[int]) -> int:
    """The widths of all levels in one number."""
    return sum(width << (3 * level) for level, width in enumerate(bits))


def _launch(x: Tensor, bits: Sequence[int], lines: Tensor, fitted: bool) -> tuple[list[Tensor], Tensor]:
    """Encode [..., K]: codes uint8 [..., K/2^l] of each level l, radii float32 [..., K/2^L].

    lines    float32 [levels, 63, 3]: (cos, sin) of the boundaries, and 1 in the upper half of the circle, 0 below
    fitted   whether those of the first level lie anywhere on the circle
    """
    size, shape, levels = x.shape[-1], x.shape[:-1], len(bits)
    counts = [size >> level for level in range(1, levels + 1)]
    codes = torch.empty(*shape, sum(counts), dtype=torch.uint8, device=x.device)
    radii = torch.empty(*shape, counts[-1], dtype=torch.float32, device=x.device)
    x, (second, third), strides = strided(x)
    padded = triton.next_power_of_2(size)
    n = x.numel() // size
    rows, grid = programs(n, padded)
    if n:
        with on(x):
            _encode[grid](
                x, codes, radii, lines, n, second, third, *strides, levels, widths(bits), fitted, size, padded, rows
            )
    return list(codes.split(counts, -1)), radii


@triton.jit
def _encode(
    x, codes, radii, lines, n, second, third, s0, s1, s2, s3,
    LEVELS: tl.constexpr, BITS: tl.constexpr, FITTED: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    tile, row, _ = rows_of(x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    here, start = (row < n)[:, None], row.to(tl.int64)[:, None]
    for level in tl.static_range(LEVELS):
        a, b = tl.split(tl.reshape(tile, (ROWS, P >> (level + 1), 2)))
        count = (1 << ((BITS >> (3 * level)) & 7)) - 1
        if FITTED and level == 0:
            code = _around(a, b, lines, count)
        elif level == 0:
            code = _sector(a, b, lines, count + 1)
        else:
            code = _beyond(a, b, lines + level * 189, count)
        j = tl.arange(0, P >> (level + 1))[None, :]
        to = codes + start * (K - (K >> LEVELS)) + (K - (K >> level)) + j
        tl.store(to, code.to(tl.uint8), mask=here & (j < (K >> (level + 1))))
        tile = tl.sqrt(a * a + b * b)
    j = tl.arange(0, P >> LEVELS)[None, :]
    tl.store(radii + start * (K >> LEVELS) + j, tile, mask=here & (j < (K >> LEVELS)))


@triton.jit
def _sector(x, y, lines, COUNT: tl.constexpr):
    """Which of COUNT equal sectors of the circle (x, y) lies in: the quadrant, then the sector inside it."""
    up, right = y >= 0, x >= 0
    quadrant = tl.where(up, tl.where(right, 0, 1), tl.where(right, 3, 2))
    odd = up != right
    a, b = tl.abs(tl.where(odd, y, x)), tl.abs(tl.where(odd, x, y))
    return quadrant * (COUNT // 4) + _beyond(a, b, lines, COUNT // 4 - 1)


@triton.jit
def _beyond(x, y, lines, COUNT: tl.constexpr):
    """How many of the boundaries, all inside a quarter of the circle, the angle of (x, y) lies beyond."""
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(COUNT):
        code += (y * tl.load(lines + i * 3) > x * tl.load(lines + i * 3 + 1)).to(tl.int32)
    return code


@triton.jit
def _around(x, y, lines, COUNT: tl.constexpr):
    """How many of the boundaries, anywhere inside (0, 2π), the angle of (x, y) lies beyond."""
    code, lower = tl.zeros(x.shape, tl.int32), y < 0
    for i in range(COUNT):
        beyond = y * tl.load(lines + i * 3) > x * tl.load(lines + i * 3 + 1)  # inside a half of the circle
        upper = tl.load(lines + i * 3 + 2) > 0
        code += tl.where(upper, lower | beyond, lower & beyond).to(tl.int32)
    return code


def decode(codes: Sequence[Tensor], radii: Tensor, points: Sequence[Tensor]) -> Tensor:
    size, levels = radii.shape[-1] << len(points), len(points)
    out = torch.empty(*radii.shape[:-1], size, dtype=torch.float32, device=radii.device)
    padded = triton.next_power_of_2(radii.shape[-1]) << levels
    rows, grid = programs(out.numel() // size, padded)
    if out.numel():
        with on(out):
            _decode[grid](
                torch.cat(list(codes), -1), radii.contiguous(), table(points), out, out.numel() // size,
                levels, size, padded, rows,
            )  # fmt: skip
    return out


@triton.jit
def _decode(
    codes, radii, table, out, n, LEVELS: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (row < n)[:, None]
    j = tl.arange(0, P >> LEVELS)[None, :]
    x = tl.load(radii + row[:, None] * (K >> LEVELS) + j, mask=here & (j < (K >> LEVELS)), other=0.0).to(tl.float32)
    for up in tl.static_range(LEVELS):
        x = _doubled(x, codes + row[:, None] * (K - (K >> LEVELS)), here, table, LEVELS - 1 - up, K, P)
    j = tl.arange(0, P)[None, :]
    tl.store(out + row[:, None] * K + j, x, mask=here & (j < K))


@triton.jit
def _doubled(x, codes, here, table, LEVEL: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    """Lengths of one level from those of the level above."""
    j = tl.arange(0, P >> (LEVEL + 1))[None, :]
    code = tl.load(codes + (K - (K >> LEVEL)) + j, mask=here & (j < (K >> (LEVEL + 1))), other=0).to(tl.int32)
    return tl.interleave(x * tl.load(table + LEVEL * 128 + code), x * tl.load(table + LEVEL * 128 + 64 + code))
