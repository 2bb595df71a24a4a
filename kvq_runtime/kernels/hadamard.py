"""Rotate by a signed Hadamard matrix with additions alone, log2(size) steps in registers; see ops/hadamard.py."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, hadamard, on, programs
from kvq_runtime.ops.hadamard import check, signs


def rotate(x: Tensor, size: int, seed: int) -> Tensor:
    return _rotate(x, size, seed, False)


def rotate_back(x: Tensor, size: int, seed: int) -> Tensor:
    return _rotate(x, size, seed, True)


@lru_cache(maxsize=64)
def signs_on(size: int, seed: int, device: torch.device) -> Tensor:
    """The ±1 of one group, on the device."""
    return signs(size, seed).to(device)


def _rotate(x: Tensor, size: int, seed: int, back: bool) -> Tensor:
    check(size, x.shape[-1])
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    rows, grid = programs(x.numel() // size, size)
    if x.numel():
        with on(x):
            sign = signs_on(size, seed, x.device)
            _kernel[grid](x, out, sign, x.numel() // size, size, size.bit_length() - 1, back, rows, **FUSED)
    return out


@triton.jit
def _kernel(x, out, signs, n, SIZE: tl.constexpr, LOG: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = (row < n)[:, None]
    tile = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, hadamard(tile, signs, SIZE, LOG, BACK), mask=here)
