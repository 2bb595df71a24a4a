"""Move what is not rounded yet by what the rounding of the rest has erred, in one launch: error feedback.

follow        difference, product and sum, of the channels of a block; see ops/feedback.py
round_group   the inputs of a group one after another, in float64; see kvq_calib/fit/predict.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on
from kvq_runtime.ops.rtn import MATRIX_BITS

# of a program
COLUMNS, ROWS, INNER = 32, 64, 32  # vectors, channels that move, channels that erred at a time
OUTPUTS = 16


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


def round_group(weight_KO: Tensor, upper_KK: Tensor, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    size, outputs = weight_KO.shape
    codes_OK = torch.empty(outputs, size, dtype=torch.uint8, device=weight_KO.device)
    errors_KO = torch.empty(size, outputs, dtype=torch.float64, device=weight_KO.device)
    if weight_KO.numel():
        with on(weight_KO):
            padded = triton.next_power_of_2(size)
            _round[(triton.cdiv(outputs, OUTPUTS),)](
                weight_KO.contiguous(), upper_KK.contiguous(), step.double().contiguous(), low.double().contiguous(),
                codes_OK, errors_KO, size, outputs, 2**MATRIX_BITS - 1, padded, OUTPUTS, **FUSED,
            )  # fmt: skip
    return codes_OK, errors_KO


@triton.jit
def _round(
    p_weight, p_upper, p_step, p_low, p_codes, p_errors, size, outputs, TOP: tl.constexpr,
    P: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """All inputs of OUTPUTS outputs; what is left of the inputs that follow lies in registers, [P, OUTPUTS]."""
    i_input, i_output = tl.arange(0, P), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m_input, m_output = i_input < size, i_output < outputs
    m_both = m_input[:, None] & m_output[None, :]
    b_rest = tl.load(p_weight + i_input[:, None] * outputs + i_output[None, :], mask=m_both, other=0.0)
    b_step = tl.load(p_step + i_output, mask=m_output, other=1.0)
    b_low = tl.load(p_low + i_output, mask=m_output, other=0.0)
    b_unit = tl.where(b_step > 0, b_step, 1.0)
    for i in range(size):
        b_own = tl.sum(tl.where(i_input[:, None] == i, b_rest, 0.0), 0)
        b_code = tl.minimum(tl.maximum((b_own - b_low) / b_unit, 0.0), TOP)
        b_code = (b_code + 4503599627370496.0) - 4503599627370496.0  # to nearest, ties to even
        b_upper = tl.load(p_upper + i * size + i_input, mask=m_input & (i_input >= i), other=0.0)
        b_error = (b_own - (b_low + b_step * b_code)) / tl.sum(tl.where(i_input == i, b_upper, 0.0), 0)
        b_rest -= b_upper[:, None] * b_error[None, :]
        tl.store(p_codes + i_output * size + i, b_code.to(tl.uint8), mask=m_output)
        tl.store(p_errors + i * outputs + i_output, b_error, mask=m_output)
