"""Move channels by what others have erred, difference, product and sum in one launch; see ops/feedback.py."""

import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on

COLUMNS, ROWS, INNER = 32, 64, 32  # of a program: vectors, channels that move, channels that erred at a time


def follow(x_NHDK: Tensor, move_HRG: Tensor, decoded_NHGK: Tensor) -> Tensor:
    if not x_NHDK.is_contiguous():
        return x_NHDK.copy_(follow(x_NHDK.contiguous(), move_HRG, decoded_NHGK))
    batch, heads, size, count = x_NHDK.shape
    move, decoded = move_HRG.contiguous(), decoded_NHGK.contiguous()
    rows, inner = move.shape[-2:]
    if x_NHDK.numel():
        with on(x_NHDK):
            grid = (batch * heads, triton.cdiv(count, COLUMNS), triton.cdiv(rows, ROWS))
            stride = heads if move.dim() > 3 else 0  # of the moves, where each batch row has its own
            _follow[grid](
                x_NHDK, move, decoded, heads, size, count, rows, inner, stride, ROWS, INNER, COLUMNS, **FUSED,
            )  # fmt: skip
    return x_NHDK


@triton.jit
def _follow(
    p_x, p_move, p_decoded, heads, size, count, rows, inner, stride,
    ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last `rows` of `size` channels move, [ROWS, COLUMNS] of a program; the `inner` before them have erred."""
    i_head = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    i_move = i_head // heads * stride + i_head % heads
    b_move = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        i_inner = start + tl.arange(0, INNER)
        m_inner = (i_inner < inner)[:, None] & (i_column < count)[None, :]
        o_x = (i_head * size + size - rows - inner + i_inner)[:, None] * count + i_column[None, :]
        o_decoded = (i_head * inner + i_inner)[:, None] * count + i_column[None, :]
        b_x = tl.load(p_x + o_x, mask=m_inner, other=0.0).to(tl.float32)
        b_decoded = tl.load(p_decoded + o_decoded, mask=m_inner, other=0.0).to(tl.float32)
        o_factor = (i_move * rows + i_row)[:, None] * inner + i_inner[None, :]
        m_factor = (i_row < rows)[:, None] & (i_inner < inner)[None, :]
        b_factor = tl.load(p_move + o_factor, mask=m_factor, other=0.0).to(tl.float32)
        b_move = tl.dot(b_factor, b_decoded - b_x, b_move, input_precision="tf32x3")
    o_out = (i_head * size + size - rows + i_row)[:, None] * count + i_column[None, :]
    m_out = (i_row < rows)[:, None] & (i_column < count)[None, :]
    b_out = tl.load(p_x + o_out, mask=m_out, other=0.0).to(tl.float32) + b_move
    tl.store(p_x + o_out, b_out.to(p_x.dtype.element_ty), mask=m_out)
