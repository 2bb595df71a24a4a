"""Add what was rounded to what was predicted, in one pass over both; see ops/predict.py."""

import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on


def add(predicted_NTC: Tensor, rounded_NTC: Tensor) -> Tensor:
    if not predicted_NTC.is_contiguous():
        return predicted_NTC.copy_(add(predicted_NTC.contiguous(), rounded_NTC))
    if predicted_NTC.numel():
        with on(predicted_NTC):
            n = predicted_NTC.numel()
            _add[(triton.cdiv(n, 1024),)](predicted_NTC, rounded_NTC.contiguous(), n, 1024, **FUSED)
    return predicted_NTC


@triton.jit
def _add(predicted, rounded, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(predicted + i, mask=i < n).to(tl.float32) + tl.load(rounded + i, mask=i < n).to(tl.float32)
    tl.store(predicted + i, x.to(predicted.dtype.element_ty), mask=i < n)
