"""Encode numbers one by one with a sphere's codebook, and look codes up; see ops/lloyd.py and stages/lloyd.py."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on, programs, rows_of, strided, turned, warps, write_codes
from kvq_runtime.ops.lloyd import sphere
from kvq_runtime.ops.pack import packed_size


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return launch(x, bits, 8, "rms", torch.float32)


@lru_cache(maxsize=16)
def _book(size: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boundaries and centroids on the device."""
    boundaries, centroids = sphere(size, bits)
    return boundaries.to(device), centroids.to(device)


def launch(
    x: Tensor, bits: int, stored: int, scale: str, dtype: torch.dtype,
    signs: Tensor | None = None, matrix: Tensor | None = None,
):  # fmt: skip
    """Encode vectors [..., K] to codes of `stored` bits and scales [...], "rms", "norm" or "least_squares"."""
    size, shape = x.shape[-1], x.shape[:-1]
    codes = torch.empty(*shape, packed_size(size, stored), dtype=torch.uint8, device=x.device)
    found = torch.empty(shape, dtype=dtype, device=x.device)
    boundaries, centroids = _book(size, bits, x.device)
    centroids = centroids.bfloat16().float()  # as the stage looks them up
    x, (second, third), strides = strided(x)
    padded = triton.next_power_of_2(size)
    rows, grid = programs(found.numel(), padded, matrix)
    turn = signs if signs is not None else matrix
    run = 1 if turn is None else len(turn)
    if found.numel():
        with on(x):
            _encode[grid](
                x, codes, found, signs, matrix, boundaries, centroids, found.numel(), second, third, *strides,
                bits, stored, scale, size, padded, rows, run, run.bit_length() - 1, num_warps=warps(matrix), **FUSED,
            )  # fmt: skip
    return codes, found


@triton.jit
def _encode(
    x, codes, scale, signs, matrix, boundaries, centroids, n, second, third, s0, s1, s2, s3,
    BITS: tl.constexpr, STORED: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    tile, row, mask = rows_of(x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    tile = turned(tile, signs, matrix, RUN, LOG)
    rms = tl.sqrt(tl.sum(tile * tile, 1) / K)
    unit = tile * tl.where(rms > 0, 1 / tl.maximum(rms, 1e-30), 1.0)[:, None]
    code = tl.zeros((ROWS, P), tl.int32)
    for b in tl.static_range((1 << BITS) - 1):
        code += (unit > tl.load(boundaries + b)).to(tl.int32)
    if SCALE == "rms":
        found = rms
    else:
        chosen = tl.where(mask, tl.load(centroids + code), 0.0)
        norm = tl.sum(chosen * chosen, 1)
        found = rms * tl.sqrt(K / norm) if SCALE == "norm" else tl.sum(tile * chosen, 1) / norm
    tl.store(scale + row, found.to(scale.dtype.element_ty), mask=row < n)
    write_codes(code, codes, row, n, STORED, K)


def decode(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    codes, out = codes.contiguous(), torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        with on(codes):
            centroids = _book(codes.shape[-1], bits, codes.device)[1]
            cells = (triton.cdiv(codes.numel(), 1024),)
            _decode[cells](codes, scale.contiguous(), centroids, out, codes.numel(), codes.shape[-1], 1024, **FUSED)
    return out


@triton.jit
def _decode(codes, scale, centroids, out, n, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    x = tl.load(centroids + tl.load(codes + i, mask=here, other=0).to(tl.int32), mask=here, other=0.0)
    tl.store(out + i, x * tl.load(scale + i // size, mask=here, other=0.0).to(tl.float32), mask=here)
