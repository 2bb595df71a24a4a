"""Encode vectors by the nearest point of a grid, trying all points, and look codes up; see ops/grid.py.

The first of the best points wins, as there; sums are in float32, so that a vector halfway between two points may get
the other one.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on, programs, rows_of, strided, turned, warps, write_codes
from kvq_runtime.ops.grid import points
from kvq_runtime.ops.pack import packed_size


def encode(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    return launch(x, dim, size, 8)


@lru_cache(maxsize=16)
def _planes(dim: int, size: int, device: torch.device) -> Tensor:
    """The grid's components, and half its squared norms, float32 [dim + 1, size]."""
    grid = points(dim, size)
    return torch.cat([grid.mT, grid.square().sum(1)[None] / 2]).contiguous().to(device)


def launch(x: Tensor, dim: int, size: int, stored: int, signs: Tensor | None = None, matrix: Tensor | None = None):
    """Encode groups [..., K] to codes of `stored` bits and float16 scales [...]."""
    count, shape = x.shape[-1] // dim, x.shape[:-1]
    codes = torch.empty(*shape, packed_size(count, stored), dtype=torch.uint8, device=x.device)
    scale = torch.empty(shape, dtype=torch.float16, device=x.device)
    x, (second, third), strides = strided(x)
    padded = triton.next_power_of_2(count)
    rows, grid = programs(scale.numel(), padded * dim, matrix)
    turn = signs if signs is not None else matrix
    run = 1 if turn is None else len(turn)
    if scale.numel():
        with on(x):
            _encode[grid](
                x, codes, scale, signs, matrix, _planes(dim, size, x.device), scale.numel(), second, third, *strides,
                dim, size, stored, count, padded, rows, run, run.bit_length() - 1, num_warps=warps(matrix), **FUSED,
            )  # fmt: skip
    return codes, scale


@triton.jit
def _streams(
    x, signs, matrix, n, second, third, s0, s1, s2, s3,
    DIM: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """The DIM components of this program's vectors, a tuple of [ROWS, P], and the row numbers."""
    parts = ()
    if signs is None and matrix is None:
        row = tl.program_id(0)
        for d in tl.static_range(DIM):
            part, row, _ = rows_of(x + d * K * s3, n, second, third, s0, s1, s2, s3, K, P, ROWS)
            parts = parts + (part,)
    else:  # a rotated row is whole in registers: K = P
        tile, row, _ = rows_of(x, n, second, third, s0, s1, s2, s3, DIM * K, DIM * P, ROWS)
        tile = tl.reshape(turned(tile, signs, matrix, RUN, LOG), (ROWS, DIM, P))
        for d in tl.static_range(DIM):
            parts = parts + (tl.sum(tl.where((tl.arange(0, DIM) == d)[None, :, None], tile, 0.0), 1),)
    return parts, row


@triton.jit
def _encode(
    x, codes, scale, signs, matrix, table, n, second, third, s0, s1, s2, s3,
    DIM: tl.constexpr, SIZE: tl.constexpr, STORED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    parts, row = _streams(x, signs, matrix, n, second, third, s0, s1, s2, s3, DIM, K, P, ROWS, RUN, LOG)
    square = tl.zeros((ROWS,), tl.float32)
    for d in tl.static_range(DIM):
        square += tl.sum(parts[d] * parts[d], 1)
    rms = tl.sqrt(square / (DIM * K))
    inverse = tl.where(rms > 0, 1 / tl.maximum(rms, 1e-30), 1.0)[:, None]
    best = tl.full((ROWS, P), float("-inf"), tl.float32)
    code = tl.zeros((ROWS, P), tl.int32)
    for g in range(SIZE):
        near = tl.zeros((ROWS, P), tl.float32) - tl.load(table + DIM * SIZE + g)
        for d in tl.static_range(DIM):
            near += parts[d] * inverse * tl.load(table + d * SIZE + g)
        code = tl.where(near > best, g, code)
        best = tl.maximum(near, best)
    here = (tl.arange(0, P) < K)[None, :]
    half = tl.load(table + DIM * SIZE + code)
    # best = x·g - |g|²/2, so the least-squares scale is rms · Σ x·g / Σ |g|²
    dot = tl.sum(tl.where(here, best + half, 0.0), 1)
    norm = tl.sum(tl.where(here, 2 * half, 0.0), 1)
    tl.store(scale + row, (rms * dot / norm).to(tl.float16), mask=row < n)
    write_codes(code, codes, row, n, STORED, K)


def decode(codes: Tensor, scale: Tensor, grid: Tensor) -> Tensor:
    count, dim = codes.shape[-1], grid.shape[1]
    out = torch.empty(*codes.shape[:-1], count * dim, dtype=torch.float32, device=codes.device)
    if codes.numel():
        with on(codes):
            cells = (triton.cdiv(codes.numel(), 1024),)
            scale, grid = scale.contiguous(), grid.contiguous()
            _decode[cells](codes.contiguous(), scale, grid, out, codes.numel(), count, dim, 1024, **FUSED)
    return out


@triton.jit
def _decode(codes, scale, grid, out, n, count, DIM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, row = i < n, i // count
    code = tl.load(codes + i, mask=here, other=0).to(tl.int32)
    size = tl.load(scale + row, mask=here, other=0.0).to(tl.float32)
    for d in tl.static_range(DIM):
        x = tl.load(grid + code * DIM + d, mask=here, other=0.0).to(tl.float32)
        tl.store(out + row * (count * DIM) + d * count + i % count, x * size, mask=here)
