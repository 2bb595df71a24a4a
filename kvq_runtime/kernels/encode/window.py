"""Append a step's tokens to the window where the device counts them; see store/storage.py.

All programs read the counts; the last of them to have done so writes the new one. A program is one warp, so that all of
its lanes have read before one of them signals it.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on

COLUMNS = 512  # channels of a program


def append(k_BTC: Tensor, v_BTC: Tensor, window_2BWC: Tensor, counts: Tensor) -> None:
    batch, tokens, width = k_BTC.shape
    k_BTC, v_BTC = (x if x.stride(2) == 1 else x.contiguous() for x in (k_BTC, v_BTC))
    strides = (*k_BTC.stride()[:2], *v_BTC.stride()[:2], window_2BWC.stride(1))
    columns = min(COLUMNS, triton.next_power_of_2(width))
    if k_BTC.numel():
        with on(k_BTC):
            _append[(batch * tokens, triton.cdiv(width, columns))](
                k_BTC, v_BTC, *window_2BWC.unbind(0), counts, tokens, *strides, width, columns, num_warps=1, **FUSED
            )


@triton.jit(do_not_specialize=["tokens"])
def _append(
    p_k, p_v, p_k_window, p_v_window, p_counts, tokens, k_row, k_token, v_row, v_token, window_row,
    C: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token of a row, COLUMNS of C channels. Strides, in elements, of rows and tokens of keys and values, and of
    rows of the window."""
    i_b, i_t = tl.program_id(0) // tokens, tl.program_id(0) % tokens
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    first, count = tl.load(p_counts + 1), tl.load(p_counts + 2)
    b_k = tl.load(p_k + i_b.to(tl.int64) * k_row + i_t * k_token + o_c, mask=m_c)
    b_v = tl.load(p_v + i_b.to(tl.int64) * v_row + i_t * v_token + o_c, mask=m_c)
    o_x = i_b.to(tl.int64) * window_row + (first + count + i_t).to(tl.int64) * C + o_c
    tl.store(p_k_window + o_x, b_k, mask=m_c)
    tl.store(p_v_window + o_x, b_v, mask=m_c)
    if tl.atomic_add(p_counts + 3, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(p_counts + 2, count + tokens)
        tl.store(p_counts + 3, 0)
