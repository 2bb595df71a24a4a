"""What the kernels share: rows of a tensor as tiles, rotation, rounding and planar packing of a tile in registers.

A row is K elements that are encoded together; a program has ROWS of them, each padded to P, a power of two. Names:
ROWS rows of a program · K elements of a row · P padded K · N rows in all.
"""

from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program
# Of every launch: a·b + c is rounded once. Where a launch does not say so, Triton 3.9 warns and later ones round twice.
FUSED = {"enable_fp_fusion": True}


def programs(rows: int, padded: int, matrix: Tensor | None = None) -> tuple[int, tuple[int]]:
    """(rows of a program, grid) for so many rows of a padded size; half as many beside a matrix, or registers spill."""
    tile = TILE if matrix is None else TILE // 2
    each = max(1, min(tile // padded, triton.next_power_of_2(max(rows, 1))))
    return each, (triton.cdiv(rows, each),)


def warps(matrix: Tensor | None) -> int:
    """Warps of a program: more for a matrix product, whose operands lie in registers."""
    return 4 if matrix is None else 8


def on(x: Tensor) -> AbstractContextManager:
    """Launch on the tensor's device."""
    return torch.cuda.device_of(x)


def strided(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """[..., K] as [A, B, C, K], without a copy where strides allow: (it, sizes of B and C, its four strides)."""
    if x.dim() > 4:
        x = x.reshape(-1, *x.shape[-3:])
    while x.dim() < 4:
        x = x[None]
    return x, tuple(x.shape[1:3]), x.stride()


@triton.jit
def place(row, second, third, s0, s1, s2):
    """The offset of a row number in a tensor [A, B, C, K] of any strides, 64 bit."""
    row = row.to(tl.int64)
    return (row // (second * third)) * s0 + (row // third % second) * s1 + (row % third) * s2


@triton.jit
def rounded(x):
    """Round to nearest, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def hadamard(x, signs, SIZE: tl.constexpr, LOG: tl.constexpr, BACK: tl.constexpr):
    """Multiply runs of SIZE elements of [ROWS, P] by diag(signs) H / √SIZE, or, BACK, by its transpose.

    Each step adds and subtracts neighbours and turns the bits of the index once, so that after LOG steps they are back.
    """
    ROWS: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    sign = tl.load(signs + tl.arange(0, P) % SIZE)[None, :]
    if not BACK:
        x = x * sign
    x = tl.reshape(x, (ROWS * (P // SIZE), SIZE))
    for _ in tl.static_range(LOG):
        even, odd = tl.split(tl.reshape(x, (x.shape[0], SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (even.shape[0], SIZE))
    x = tl.reshape(x, (ROWS, P)) * (1 / SIZE**0.5)
    if BACK:
        x = x * sign
    return x


@triton.jit
def turned(x, signs, matrix, SIZE: tl.constexpr, LOG: tl.constexpr):
    """Rotate runs of SIZE elements of [ROWS, P]: by a Hadamard with `signs`, by `matrix`, or, both None, not at all."""
    if signs is not None:
        x = hadamard(x, signs, SIZE, LOG, False)
    if matrix is not None:
        i = tl.arange(0, SIZE)
        turn = tl.load(matrix + i[:, None] * SIZE + i[None, :])
        runs = tl.reshape(x, (x.shape[0] * (x.shape[1] // SIZE), SIZE))
        x = tl.reshape(tl.dot(runs, turn, input_precision="tf32x3"), (x.shape[0], x.shape[1]))
    return x


@triton.jit
def rows_of(x, n, second, third, s0, s1, s2, s3, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Load this program's rows as float32 [ROWS, P], zero beyond them: (tile, row numbers, mask of the K elements)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, P)
    mask = (j < K)[None, :]
    start = place(row, second, third, s0, s1, s2)
    x = tl.load(x + start[:, None] + j.to(tl.int64)[None, :] * s3, mask=(row < n)[:, None] & mask, other=0.0)
    return x.to(tl.float32), row, mask


@triton.jit
def write_codes(codes, out, row, n, BITS: tl.constexpr, K: tl.constexpr):
    """Pack codes int32 [ROWS, P] planar (see ops/pack.py) and store them; fewer than 8 bits: K = P, at least 8."""
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            _write_plane(codes, out, row, n, 8 >> log, BITS, K)


@triton.jit
def _write_plane(codes, out, row, n, W: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr):
    ROWS: tl.constexpr = codes.shape[0]
    P: tl.constexpr = codes.shape[1]
    S: tl.constexpr = 8 // W
    SHIFT: tl.constexpr = BITS - BITS % (2 * W)  # what the wider planes hold
    plane = tl.reshape((codes >> SHIFT) & ((1 << W) - 1), (ROWS, S, P // S))
    byte = tl.sum(plane << (tl.arange(0, S) * W)[None, :, None], 1)
    j = tl.arange(0, P // S)[None, :]
    to = out + row.to(tl.int64)[:, None] * (K * BITS // 8) + (K * SHIFT // 8) + j
    tl.store(to, byte.to(tl.uint8), mask=(row < n)[:, None] & (j < K // S))
