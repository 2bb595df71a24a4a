"""Move channels by what others have erred, difference, product and sum in one launch; see ops/feedback.py."""

import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on

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
            own = heads if move.dim() > 3 else 0  # where each batch row has its own moves
            _follow[grid](
                x_NHDK, move, decoded, heads, size, count, rows, inner, own, ROWS, INNER, COLUMNS, **FUSED,
            )  # fmt: skip
    return x_NHDK


@triton.jit
def _follow(
    x, move, decoded, heads, size, count, rows, inner, own,
    ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The moving channels are the last `rows`, those that erred the `inner` before them."""
    line = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    which = line // heads * own + line % heads
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        g = start + tl.arange(0, INNER)
        here = (g < inner)[:, None] & (k < count)[None, :]
        was = tl.load(
            x + (line * size + size - rows - inner + g)[:, None] * count + k[None, :], mask=here, other=0.0
        ).to(tl.float32)
        now = tl.load(decoded + (line * inner + g)[:, None] * count + k[None, :], mask=here, other=0.0)
        at = move + (which * rows + r)[:, None] * inner + g[None, :]
        part = tl.load(at, mask=(r < rows)[:, None] & (g < inner)[None, :], other=0.0).to(tl.float32)
        total = tl.dot(part, now.to(tl.float32) - was, total, input_precision="tf32x3")
    to = x + (line * size + size - rows + r)[:, None] * count + k[None, :]
    there = (r < rows)[:, None] & (k < count)[None, :]
    tl.store(to, (tl.load(to, mask=there, other=0.0).to(tl.float32) + total).to(x.dtype.element_ty), mask=there)
