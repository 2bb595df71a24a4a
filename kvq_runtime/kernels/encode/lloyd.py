"""Encode numbers one by one with a sphere's codebook; see ops/lloyd.py.

One launch rotates, scales, rounds and packs.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.pack import pack
from kvq_runtime.kernels.encode.tile import Rows, load_rows, on, rotated, store_codes
from kvq_runtime.ops.lloyd import Scale, even, sphere
from kvq_runtime.ops.pack import packed_size
from kvq_runtime.ops.rotation import Rotation


def encode(x: Tensor, bits: int, scale: Scale, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    return _launch(x, bits, scale, rotation, _codebook(x.shape[-1], bits, x.device))


def encode_even(x: Tensor, bits: int, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    return _launch(x, bits, "least_squares", rotation, _even(x.shape[-1], bits, x.device))


def _launch(
    x: Tensor, bits: int, scale: Scale, rotation: Rotation, codebook: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    rows = Rows.of(x, rotation)
    stored, size = rows.stored(bits), x.shape[-1]
    codes = torch.empty(*x.shape[:-1], packed_size(size, stored), dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
    if rows.count:
        with on(x):
            _encode[rows.grid](
                rows.x, codes, scales, *rows.rotation, *codebook, *rows.layout,
                bits, stored, scale, *rows.sizes, **rows.options,
            )  # fmt: skip
    return codes if stored == bits else pack(codes, bits), scales


@lru_cache(maxsize=16)
def _codebook(size: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boundaries, and centroids rounded to bfloat16 as they are decoded, float32 on the device."""
    boundaries, centroids = sphere(size, bits)
    return boundaries.to(device), centroids.to(device).bfloat16().float()


@lru_cache(maxsize=16)
def _even(size: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same of evenly spaced centroids."""
    boundaries, centroids = even(size, bits)
    return boundaries.to(device), centroids.to(device)


@triton.jit
def _encode(
    p_x, p_codes, p_scale, p_signs, p_matrix, p_boundaries, p_centroids, n, second, third, s0, s1, s2, s3,
    BITS: tl.constexpr, STORED: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
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
    store_codes(b_code, p_codes, i_row, n, STORED, K)
