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

from kvq_runtime.kernels.pack import streams
from kvq_runtime.kernels.tile import FUSED, on, programs, rows_of, strided, turned, warps
from kvq_runtime.ops import polar
from kvq_runtime.ops.pack import packed_size


def encode(x: Tensor, bits: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    codes, _, radii = _launch(x, bits, None, 0)
    return _levels(codes, x.shape[-1], len(bits)), radii


def encode_fitted(x: Tensor, boundaries: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    codes, _, radii = _launch(x, [len(level).bit_length() for level in boundaries], boundaries, 0)
    return _levels(codes, x.shape[-1], len(boundaries)), radii


def packed(
    x: Tensor, bits: Sequence[int], boundaries: Sequence[Tensor] | None,
    signs: Tensor | None = None, matrix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    size = sum(packed_size(sum(counts), wide) for wide, counts in polar.runs(x.shape[-1], tuple(bits)))
    return _launch(x, bits, boundaries, size, signs, matrix)[1:]


def _levels(codes: Tensor, size: int, levels: int) -> list[Tensor]:
    return list(codes.split([size >> level for level in range(1, levels + 1)], -1))


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


def _lines(bits: Sequence[int], boundaries: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """(cos, sin) of the boundaries, and 1 in the upper half of the circle, 0 below: float32 [levels, 63, 3]."""
    if boundaries is None:
        return _quarters(tuple(bits), device)
    padded = torch.stack([torch.nn.functional.pad(level.double(), (0, 63 - len(level))) for level in boundaries])
    return torch.stack([padded.cos(), padded.sin(), (padded < math.pi).double()], 2).float().to(device)


def _launch(
    x: Tensor, bits: Sequence[int], boundaries: Sequence[Tensor] | None, size: int,
    signs: Tensor | None = None, matrix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Encode [..., K]: codes uint8 [..., K - K/2^L], level after level, those packed to `size` bytes, and the radii.

    Radii are lengths, float32 [..., K/2^L]; beside packed codes root mean squares, float16.
    """
    count, shape, levels = x.shape[-1], x.shape[:-1], len(bits)
    codes = torch.empty(*shape, count - (count >> levels), dtype=torch.uint8, device=x.device)
    out = torch.empty(*shape, size, dtype=torch.uint8, device=x.device)
    kind = torch.float16 if size else torch.float32
    radii = torch.empty(*shape, count >> levels, dtype=kind, device=x.device)
    n = x.numel() // count
    x, (second, third), strides = strided(x)
    padded = triton.next_power_of_2(count)
    rows, grid = programs(n, padded, matrix)
    turn = signs if signs is not None else matrix
    run = 1 if turn is None else len(turn)
    if n:
        with on(x):
            _encode[grid](
                x, codes, out, radii, signs, matrix, _lines(bits, boundaries, x.device), n, second, third, *strides,
                levels, widths(bits), boundaries is not None, size, count, padded, rows, run, run.bit_length() - 1,
                num_warps=warps(matrix), **FUSED,
            )  # fmt: skip
    return codes, out, radii


@triton.jit
def _encode(
    x, codes, out, radii, signs, matrix, lines, n, second, third, s0, s1, s2, s3,
    LEVELS: tl.constexpr, BITS: tl.constexpr, FITTED: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    tile, row, _ = rows_of(x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    tile = turned(tile, signs, matrix, RUN, LOG)
    here, start = (row < n)[:, None], row.to(tl.int64)[:, None]
    for level in tl.static_range(LEVELS):
        a, b = tl.split(tl.reshape(tile, (ROWS, P >> (level + 1), 2)))
        if FITTED and level == 0:
            code = _around(a, b, lines, (1 << (BITS & 7)) - 1)
        elif level == 0:
            code = _sector(a, b, lines, 1 << (BITS & 7))
        else:
            code = _beyond(a, b, lines + level * 189, (1 << ((BITS >> (3 * level)) & 7)) - 1)
        j = tl.arange(0, P >> (level + 1))[None, :]
        to = codes + start * (K - (K >> LEVELS)) + (K - (K >> level)) + j
        tl.store(to, code.to(tl.uint8), mask=here & (j < (K >> (level + 1))))
        tile = tl.sqrt(a * a + b * b)
    j = tl.arange(0, P >> LEVELS)[None, :]
    if SIZE > 0:
        tile = (tile * 2 ** (-LEVELS / 2)).to(tl.float16)
        tl.debug_barrier()  # what is packed was stored by other threads
        _pack(codes + start * (K - (K >> LEVELS)), out + start * SIZE, here, LEVELS, BITS, K)
    tl.store(radii + start * (K >> LEVELS) + j, tile, mask=here & (j < (K >> LEVELS)))


@triton.constexpr_function
def _last(level, bits, levels):
    """The level after a run of the same width."""
    width = (bits >> (3 * level)) & 7
    while level < levels and (bits >> (3 * level)) & 7 == width:
        level += 1
    return level


@triton.jit
def _pack(codes, out, here, LEVELS: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr):
    """Pack the codes of every run of levels of the same width."""
    for level in tl.static_range(LEVELS):
        if level == 0 or (BITS >> (3 * level)) & 7 != (BITS >> (3 * level - 3)) & 7:
            out = _run(codes, out, here, level, _last(level, BITS, LEVELS), (BITS >> (3 * level)) & 7, K)


@triton.jit
def _run(codes, out, here, LEVEL: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    """One of them; where the next one's bytes begin."""
    COUNT: tl.constexpr = (K >> LEVEL) - (K >> LAST)
    j = tl.arange(0, triton.next_power_of_2(COUNT))[None, :]
    done = 0
    value = tl.zeros((here.shape[0], j.shape[1]), tl.int32)
    for log in tl.static_range(4):
        if WIDTH & (8 >> log) != 0:
            length = (COUNT * (8 >> log) + 7) // 8
            value |= streams(codes + (K - (K >> LEVEL)), here, j - done, length, COUNT, 8 >> log, WIDTH)
            done += length
    tl.store(out + j, value.to(tl.uint8), mask=here & (j < done))
    return out + done


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
                levels, size, padded, rows, **FUSED,
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
