"""Encode groups by one code for each element, or few of them, with the numbers of a group beside them.

rtn      round to nearest between the ends of a group, see ops/rtn.py; with any strides: groups of tokens need no
         transpose
lloyd    by a sphere's codebook, or evenly spaced levels, see ops/lloyd.py
grid     the nearest point of a grid, trying all points, see ops/grid.py. The first of the best points wins, as there;
         sums are in float32, so that a vector halfway between two points may get the other one

One launch rotates, finds ends or scales, and rounds; torch packs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import Rows, load_rows, on, rotated, rounded, store_codes
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.grid import points
from kvq_runtime.ops.lloyd import Scale, sphere
from kvq_runtime.ops.pack import pack
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.ops.rtn import Range


def encode_rtn(x: Tensor, bits: int, range: Range = "minmax", rotation: Rotation = None) -> tuple[Tensor, ...]:
    rows = Rows.of(x, rotation)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    step = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
    low = torch.empty_like(step) if range == "minmax" else None
    if rows.count:
        with on(x):
            _rtn[rows.grid](rows.x, codes, step, low, *rows.rotation, *rows.layout, bits, *rows.sizes, **rows.options)
    codes = pack(codes, bits)
    return (codes, step) if low is None else (codes, step, low)


@triton.jit
def _rtn(
    p_x, p_codes, p_step, p_low, p_signs, p_matrix, n, second, third, s0, s1, s2, s3,
    BITS: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Tiles [ROWS, P], ends and steps [ROWS]; symmetric where there is no p_low."""
    b_x, i_row, m_k = load_rows(p_x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    b_x = rotated(b_x, p_signs, p_matrix, RUN, LOG)
    TOP: tl.constexpr = (1 << BITS) - 1
    if p_low is not None:
        b_low = tl.min(tl.where(m_k, b_x, float("inf")), 1).to(tl.float16)
        b_high = tl.max(tl.where(m_k, b_x, float("-inf")), 1)
        b_step = (tl.maximum(b_high - b_low.to(tl.float32), 0.0) / TOP).to(tl.float16)
        tl.store(p_low + i_row, b_low, mask=i_row < n)
        b_low = b_low.to(tl.float32)
    else:
        b_step = (tl.max(tl.where(m_k, tl.abs(b_x), 0.0), 1) * (2 / TOP)).to(tl.float16)
        b_low = b_step.to(tl.float32) * (-TOP / 2)
    tl.store(p_step + i_row, b_step, mask=i_row < n)
    b_step = b_step.to(tl.float32)
    b_inverse = tl.where(b_step > 0, 1 / tl.maximum(b_step, 1e-30), 0.0)
    b_code = rounded(tl.minimum(tl.maximum((b_x - b_low[:, None]) * b_inverse[:, None], 0.0), TOP))
    store_codes(b_code.to(tl.int32), p_codes, i_row, n, K)


def encode_lloyd(x: Tensor, bits: int, scale: Scale, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    rows = Rows.of(x, rotation)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
    if rows.count:
        with on(x):
            _lloyd[rows.grid](
                rows.x, codes, scales, *rows.rotation, *_codebook(x.shape[-1], bits, x.device), *rows.layout,
                bits, scale, *rows.sizes, **rows.options,
            )  # fmt: skip
    return pack(codes, bits), scales


@constant(32)
def _codebook(size: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return boundaries, and centroids rounded to bfloat16 as they are decoded, float32 on the device."""
    boundaries, centroids = sphere(size, bits)
    return boundaries.to(device), centroids.to(device).bfloat16().float()


@triton.jit
def _lloyd(
    p_x, p_codes, p_scale, p_signs, p_matrix, p_boundaries, p_centroids, n, second, third, s0, s1, s2, s3,
    BITS: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Tiles [ROWS, P], root mean squares and scales [ROWS]."""
    b_x, i_row, m_k = load_rows(p_x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    b_x = rotated(b_x, p_signs, p_matrix, RUN, LOG)
    b_rms = tl.sqrt(tl.sum(b_x * b_x, 1) / K)
    b_unit = b_x * tl.where(b_rms > 0, 1 / tl.maximum(b_rms, 1e-30), 1.0)[:, None]
    b_code = tl.zeros((ROWS, P), tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        b_code += (b_unit > tl.load(p_boundaries + i)).to(tl.int32)
    if SCALE == "plain":
        b_scale = b_rms
    else:
        b_point = tl.where(m_k, tl.load(p_centroids + b_code), 0.0)
        b_norm = tl.sum(b_point * b_point, 1)
        b_scale = b_rms * tl.sqrt(K / b_norm) if SCALE == "norm" else tl.sum(b_x * b_point, 1) / b_norm
    tl.store(p_scale + i_row, b_scale.to(p_scale.dtype.element_ty), mask=i_row < n)
    store_codes(b_code, p_codes, i_row, n, K)


def encode_grid(x: Tensor, dim: int, size: int, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    rows = Rows.of(x, rotation, dim)
    codes = torch.empty(*x.shape[:-1], x.shape[-1] // dim, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
    if rows.count:
        with on(x):
            _grid[rows.grid](
                rows.x, codes, scale, *rows.rotation, _planes(dim, size, x.device), *rows.layout,
                dim, size, *rows.sizes, **rows.options,
            )  # fmt: skip
    return pack(codes, size.bit_length() - 1), scale


@constant(16)
def _planes(dim: int, size: int, device: torch.device) -> Tensor:
    """Return the grid's components, and half its squared norms, float32 [dim + 1, size]."""
    grid = points(dim, size)
    return torch.cat([grid.mT, grid.square().sum(1)[None] / 2]).contiguous().to(device)


@triton.jit
def _streams(
    p_x, p_signs, p_matrix, n, second, third, s0, s1, s2, s3,
    DIM: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Load the DIM components of this program's vectors, K to a group: a tuple of [ROWS, P]; and row numbers [ROWS]."""
    parts = ()
    if p_signs is None and p_matrix is None:
        i_row = tl.program_id(0)
        for d in tl.static_range(DIM):
            b_part, i_row, _ = load_rows(p_x + d * K * s3, n, second, third, s0, s1, s2, s3, K, P, ROWS)
            parts = parts + (b_part,)
    else:  # a rotated row is whole in registers: K = P
        b_x, i_row, _ = load_rows(p_x, n, second, third, s0, s1, s2, s3, DIM * K, DIM * P, ROWS)
        b_x = tl.reshape(rotated(b_x, p_signs, p_matrix, RUN, LOG), (ROWS, DIM, P))
        for d in tl.static_range(DIM):
            parts = parts + (tl.sum(tl.where((tl.arange(0, DIM) == d)[None, :, None], b_x, 0.0), 1),)
    return parts, i_row


@triton.jit
def _grid(
    p_x, p_codes, p_scale, p_signs, p_matrix, p_planes, n, second, third, s0, s1, s2, s3,
    DIM: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Codes of K vectors of DIM elements: tiles [ROWS, P], scales [ROWS]."""
    parts, i_row = _streams(p_x, p_signs, p_matrix, n, second, third, s0, s1, s2, s3, DIM, K, P, ROWS, RUN, LOG)
    b_square = tl.zeros((ROWS,), tl.float32)
    for d in tl.static_range(DIM):
        b_square += tl.sum(parts[d] * parts[d], 1)
    b_rms = tl.sqrt(b_square / (DIM * K))
    b_inverse = tl.where(b_rms > 0, 1 / tl.maximum(b_rms, 1e-30), 1.0)[:, None]
    b_best = tl.full((ROWS, P), float("-inf"), tl.float32)
    b_code = tl.zeros((ROWS, P), tl.int32)
    for i_point in range(SIZE):
        b_score = tl.zeros((ROWS, P), tl.float32) - tl.load(p_planes + DIM * SIZE + i_point)
        for d in tl.static_range(DIM):
            b_score += parts[d] * b_inverse * tl.load(p_planes + d * SIZE + i_point)
        b_code = tl.where(b_score > b_best, i_point, b_code)
        b_best = tl.maximum(b_score, b_best)
    m_k = (tl.arange(0, P) < K)[None, :]
    b_half = tl.load(p_planes + DIM * SIZE + b_code)
    # best = x·g - |g|²/2, so the least-squares scale is rms · Σ x·g / Σ |g|²
    b_dot = tl.sum(tl.where(m_k, b_best + b_half, 0.0), 1)
    b_norm = tl.sum(tl.where(m_k, 2 * b_half, 0.0), 1)
    tl.store(p_scale + i_row, (b_rms * b_dot / b_norm).to(tl.float16), mask=i_row < n)
    store_codes(b_code, p_codes, i_row, n, K)
