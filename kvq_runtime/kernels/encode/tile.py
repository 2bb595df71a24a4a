"""Shared code of the encoding kernels: groups as rows of a tile, rotation, rounding.

A row is a group of K elements that are encoded together; a program has ROWS of them, each padded to P, a power of two.
Rotations act on runs of S elements of a row.

Names in kernels, here and in the other files: p_ pointers · b_ tiles · i_ indices · m_ masks · o_ offsets of elements ·
n rows in all.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.rotation import Rotation, SignedHadamard, in_tile, rotate, signs

TILE = 4096  # elements of a program
# Of every launch: a·b + c is rounded once. Where a launch does not say so, Triton 3.9 warns and later ones round twice.
FUSED = {"enable_fp_fusion": True}


class Rows(NamedTuple):
    """Groups [..., K], of any float dtype and strides, as the rows of one launch, and what rotates them in it.

    x         the groups as [A, B, C, K]
    rotation  signs float32 [S] of a Hadamard, or None; matrix float32 [S, S], or None
    layout    n = A · B · C, B, C, and the four strides
    sizes     K, P, ROWS, S, log2(S): compile-time arguments
    grid      programs
    options   of the launch
    """

    x: Tensor
    rotation: tuple[Tensor | None, Tensor | None]
    layout: tuple[int, ...]
    sizes: tuple[int, int, int, int, int]
    grid: tuple[int]
    options: dict[str, Any]

    @staticmethod
    def of(x: Tensor, rotation: Rotation, streams: int = 1) -> "Rows":
        """Rotate now what a kernel does not rotate in registers, and lay out the rest.

        streams   into which a group falls, side by side: K and P are of one of them, and rotated groups are not padded
        """
        size = x.shape[-1] // streams
        padded = triton.next_power_of_2(size)
        if rotation is not None and not (in_tile(rotation, x.shape[-1]) and (streams == 1 or size == padded)):
            x, rotation = rotate(x, rotation), None
        sign = signs_on(rotation.size, rotation.seed, x.device) if isinstance(rotation, SignedHadamard) else None
        matrix = rotation.contiguous() if isinstance(rotation, Tensor) else None
        run = 1 if rotation is None else len(matrix) if sign is None else len(sign)
        count = x.numel() // max(1, x.shape[-1])
        each, grid = programs(count, padded * streams, matrix)
        x = strided(x)
        layout = (count, *x.shape[1:3], *x.stride())
        sizes = (size, padded, each, run, run.bit_length() - 1)
        # more warps for a matrix product, whose operands lie in registers
        return Rows(x, (sign, matrix), layout, sizes, grid, {"num_warps": 4 if matrix is None else 8} | FUSED)

    @property
    def count(self) -> int:
        """Rows in all."""
        return self.layout[0]


@constant(64)
def signs_on(size: int, seed: int, device: torch.device) -> Tensor:
    """Return the ±1 of one run, on the device."""
    return signs(size, seed).to(device)


def programs(rows: int, padded: int, matrix: Tensor | None = None) -> tuple[int, tuple[int]]:
    """Return (rows of a program, grid) of `rows` rows of a padded size; half as many beside a matrix, or it spills."""
    tile = TILE if matrix is None else TILE // 2
    each = max(1, min(tile // padded, triton.next_power_of_2(max(rows, 1))))
    return each, (triton.cdiv(rows, each),)


def on(x: Tensor) -> AbstractContextManager:
    """Launch on the tensor's device."""
    return torch.cuda.device_of(x)


def strided(x: Tensor) -> Tensor:
    """Return [..., K] as [A, B, C, K], without a copy where strides allow."""
    if x.dim() > 4:
        x = x.reshape(-1, *x.shape[-3:])
    while x.dim() < 4:
        x = x[None]
    return x


@triton.jit
def load_rows(p_x, n, second, third, s0, s1, s2, s3, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Load this program's rows of [A, second, third, K], strides s0 to s3: float32 [ROWS, P], zero beyond K and n.

    Also i_row, the row numbers [ROWS], and m_k, the mask of the K elements [1, P].
    """
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_k = tl.arange(0, P)
    m_k = (i_k < K)[None, :]
    row = i_row.to(tl.int64)
    o_row = (row // (second * third)) * s0 + (row // third % second) * s1 + (row % third) * s2
    o_x = o_row[:, None] + i_k.to(tl.int64)[None, :] * s3
    b_x = tl.load(p_x + o_x, mask=(i_row < n)[:, None] & m_k, other=0.0)
    return b_x.to(tl.float32), i_row, m_k


@triton.jit
def rotated(b_x, p_signs, p_matrix, RUN: tl.constexpr, LOG: tl.constexpr):
    """Rotate runs of RUN elements of [ROWS, P]: by a Hadamard with signs, by a matrix, or, both None, not at all."""
    if p_signs is not None:
        b_x = hadamard_runs(b_x, p_signs, RUN, LOG)
    if p_matrix is not None:
        i_run = tl.arange(0, RUN)
        b_matrix = tl.load(p_matrix + i_run[:, None] * RUN + i_run[None, :]).to(tl.float32)
        b_runs = tl.reshape(b_x, (b_x.shape[0] * (b_x.shape[1] // RUN), RUN))
        b_x = tl.reshape(tl.dot(b_runs, b_matrix, input_precision="tf32x3"), (b_x.shape[0], b_x.shape[1]))
    return b_x


@triton.jit
def hadamard_runs(b_x, p_signs, RUN: tl.constexpr, LOG: tl.constexpr):
    """Multiply runs of RUN elements of [ROWS, P] by diag(signs) H / √RUN, LOG = log2(RUN).

    Each step adds and subtracts neighbours and rotates the bits of the index by one; LOG steps restore the order.
    """
    ROWS: tl.constexpr = b_x.shape[0]
    P: tl.constexpr = b_x.shape[1]
    b_sign = tl.load(p_signs + tl.arange(0, P) % RUN)[None, :]
    b_x = tl.reshape(b_x * b_sign, (ROWS * (P // RUN), RUN))
    for _ in tl.static_range(LOG):
        b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], RUN // 2, 2)))
        b_pair = tl.join(b_even + b_odd, b_even - b_odd)
        b_x = tl.reshape(tl.permute(b_pair, (0, 2, 1)), (b_even.shape[0], RUN))
    return tl.reshape(b_x, (ROWS, P)) * (1 / RUN**0.5)


@triton.jit
def rounded(x):
    """Round to nearest, ties to even, for |x| < 2^22; any shape."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_codes(b_code, p_codes, i_row, n, K: tl.constexpr):
    """Store codes int32 [ROWS, P], of which K are there, as uint8 [n, K]."""
    i_k = tl.arange(0, b_code.shape[1])[None, :]
    o_code = i_row.to(tl.int64)[:, None] * K + i_k
    tl.store(p_codes + o_code, b_code.to(tl.uint8), mask=(i_row < n)[:, None] & (i_k < K))
