"""Round to nearest between the ends of a group; see ops/rtn.py.

One launch rotates, finds the ends, rounds and packs, with any strides, so that groups of tokens need no transpose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.pack import pack
from kvq_runtime.kernels.encode.tile import BLOCK, FUSED, Rows, load_rows, on, rotated, rounded, store_codes
from kvq_runtime.ops.pack import packed_size
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.ops.rtn import Range


def encode(x: Tensor, bits: int, range: Range = "minmax", rotation: Rotation = None) -> tuple[Tensor, ...]:
    rows = Rows.of(x, rotation)
    stored = rows.stored(bits)
    codes = torch.empty(*x.shape[:-1], packed_size(x.shape[-1], stored), dtype=torch.uint8, device=x.device)
    step = torch.empty(x.shape[:-1], dtype=torch.float16, device=x.device)
    low = torch.empty_like(step) if range == "minmax" else None
    if rows.count:
        with on(x):
            _encode[rows.grid](
                rows.x, codes, step, low, *rows.rotation, *rows.layout, bits, stored, *rows.sizes, **rows.options
            )
    codes = codes if stored == bits else pack(codes, bits)
    return (codes, step) if low is None else (codes, step, low)


@triton.jit
def _encode(
    p_x, p_codes, p_step, p_low, p_signs, p_matrix, n, second, third, s0, s1, s2, s3,
    BITS: tl.constexpr, STORED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
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
    store_codes(b_code.to(tl.int32), p_codes, i_row, n, STORED, K)


def decode(codes: Tensor, step: Tensor, low: Tensor | None, bits: int, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    codes, size = codes.contiguous(), codes.shape[-1]
    target = out if out.is_contiguous() else torch.empty_like(codes, dtype=out.dtype)
    if codes.numel():
        with on(codes):
            low = low if low is None else low.contiguous()
            grid = (triton.cdiv(codes.numel(), BLOCK),)
            _decode[grid](codes, step.contiguous(), low, target, codes.numel(), size, bits, BLOCK, **FUSED)
    return out if target is out else out.copy_(target)


@triton.jit
def _decode(p_codes, p_step, p_low, p_out, n, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of n codes, `size` to a group."""
    i_code = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_code, i_group = i_code < n, i_code // size
    b_step = tl.load(p_step + i_group, mask=m_code, other=0.0).to(tl.float32)
    b_low = b_step * (-((1 << BITS) - 1) / 2)
    if p_low is not None:
        b_low = tl.load(p_low + i_group, mask=m_code, other=0.0).to(tl.float32)
    b_x = tl.load(p_codes + i_code, mask=m_code, other=0).to(tl.float32) * b_step + b_low
    tl.store(p_out + i_code, b_x, mask=m_code)
