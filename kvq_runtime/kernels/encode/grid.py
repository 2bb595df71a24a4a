"""Encode vectors by the nearest point of a grid, trying all points; see ops/grid.py.

The first of the best points wins, as there; sums are in float32, so that a vector halfway between two points may get
the other one. One launch rotates, scales, finds points and packs.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.pack import pack
from kvq_runtime.kernels.encode.tile import Rows, load_rows, on, rotated, store_codes
from kvq_runtime.ops.grid import points
from kvq_runtime.ops.pack import packed_size
from kvq_runtime.ops.rotation import Rotation


def encode(x: Tensor, dim: int, size: int, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    rows = Rows.of(x, rotation, dim)
    bits = size.bit_length() - 1
    stored = rows.stored(bits)
    codes = torch.empty(*x.shape[:-1], packed_size(x.shape[-1] // dim, stored), dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
    if rows.count:
        with on(x):
            _encode[rows.grid](
                rows.x, codes, scale, *rows.rotation, _planes(dim, size, x.device), *rows.layout,
                dim, size, stored, *rows.sizes, **rows.options,
            )  # fmt: skip
    return codes if stored == bits else pack(codes, bits), scale


@lru_cache(maxsize=16)
def _planes(dim: int, size: int, device: torch.device) -> Tensor:
    """The grid's components, and half its squared norms, float32 [dim + 1, size]."""
    grid = points(dim, size)
    return torch.cat([grid.mT, grid.square().sum(1)[None] / 2]).contiguous().to(device)


@triton.jit
def _streams(
    p_x, p_signs, p_matrix, n, second, third, s0, s1, s2, s3,
    DIM: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """The DIM components of this program's vectors, K to a group: a tuple of [ROWS, P]; and the row numbers [ROWS]."""
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
def _encode(
    p_x, p_codes, p_scale, p_signs, p_matrix, p_planes, n, second, third, s0, s1, s2, s3,
    DIM: tl.constexpr, SIZE: tl.constexpr, STORED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
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
    store_codes(b_code, p_codes, i_row, n, STORED, K)
