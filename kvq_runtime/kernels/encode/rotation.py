"""Rotate by a signed Hadamard matrix with additions alone, log2(size) steps in registers; see ops/rotation.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, hadamard_runs, on, programs, signs_on
from kvq_runtime.ops.rotation import check


def hadamard(x: Tensor, size: int, seed: int) -> Tensor:
    check(size, x.shape)
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    count = x.numel() // size
    rows, grid = programs(count, size)
    if count:
        with on(x):
            signs = signs_on(size, seed, x.device)
            _hadamard[grid](x, out, signs, count, size, size.bit_length() - 1, rows, **FUSED)
    return out


@triton.jit
def _hadamard(p_x, p_out, p_signs, n, RUN: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr):
    """Rotate ROWS of the n runs: tiles [ROWS, RUN]."""
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_x = i_row[:, None] * RUN + tl.arange(0, RUN)[None, :]
    m_row = (i_row < n)[:, None]
    b_x = tl.load(p_x + o_x, mask=m_row, other=0.0).to(tl.float32)
    tl.store(p_out + o_x, hadamard_runs(b_x, p_signs, RUN, LOG), mask=m_row)
