"""Round a matrix's inputs one after another, and move the rest by their errors, in float64.

See kvq_calib/fit/predict.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on
from kvq_runtime.ops.rtn import MATRIX_BITS

OUTPUTS = 16  # of a program


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
