"""Find the best paths through a trellis in two launches; see ops/trellis.py.

In the first the costs of all states lie in registers: of each step
nothing is written but which code each path has dropped. The second follows the drops from the last state back. Numbers
are finite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import on
from kvq_runtime.ops import trellis

TILE = 4096  # costs of a program, at the most those of ROWS rows
ROWS = 8  # of 2^7 states; more leave room for fewer warps
FOLLOWED = 32  # rows of a program that goes back
DROPPED = 1 << 28  # bytes that all steps of the rows of one launch keep
# Products and sums are rounded one by one, as in torch: the paths are the same ones.
OPTIONS = {"enable_fp_fusion": False, "num_warps": 1}


def best_path(x_NGK: Tensor, rms_NG: Tensor, table_S: Tensor, bits: int) -> Tensor:
    rows, groups, size = x_NGK.shape
    steps, rests = groups * size, len(table_S) >> bits
    in_word = min(rests, 1 << (32 // bits).bit_length() - 1)  # codes: a power of two, so that shifts find one
    path_TN = torch.empty(steps, rows, dtype=torch.int64, device=x_NGK.device)
    table_2S = torch.stack([-table_S, table_S.square() / 2])
    room = max(1, DROPPED // max(1, 4 * (rests // in_word) * steps))
    with on(x_NGK):
        for first in range(0, rows if steps else 0, room):
            part = slice(first, first + room)
            x_TN, ratio_GN = x_NGK[part].flatten(1).mT.contiguous(), trellis.ratios(rms_NG[part])
            _search(x_TN, ratio_GN, table_2S, size, bits, in_word, path_TN[:, part])
    return path_TN.T


def _search(
    x_TN: Tensor, ratio_GN: Tensor, table_2S: Tensor, size: int, bits: int, in_word: int, path_TN: Tensor
) -> None:
    """Fill in the paths of some rows, in groups of `size` steps."""
    (steps, rows), states, stride = x_TN.shape, table_2S.shape[1], path_TN.stride(0)
    words = (states >> bits) // in_word
    dropped = torch.empty(steps, words, rows, dtype=torch.int32, device=x_TN.device)
    last = torch.empty(rows, dtype=torch.int32, device=x_TN.device)
    each = min(ROWS, max(1, TILE // states))
    _forward[(triton.cdiv(rows, each),)](
        x_TN, ratio_GN, table_2S, dropped, last, rows, steps, size, trellis.UNREACHED,
        bits, states, in_word, each, **OPTIONS,
    )  # fmt: skip
    _back[(triton.cdiv(rows, FOLLOWED),)](
        dropped, last, path_TN, rows, steps, stride, (steps - 1) * stride,
        bits, states >> bits, words, in_word.bit_length() - 1, FOLLOWED, **OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "steps", "size"])
def _forward(
    p_x, p_ratio, p_table, p_dropped, p_last, rows, steps, size, unreached,
    BITS: tl.constexpr, STATES: tl.constexpr, IN_WORD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The last state of each of ROWS rows, and what paths dropped: a state is its oldest code · RESTS + the rest.

    IN_WORD   dropped codes of a word
    """
    CODES: tl.constexpr = 1 << BITS
    RESTS: tl.constexpr = STATES >> BITS
    WORDS: tl.constexpr = RESTS // IN_WORD
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < rows
    o_row = i_row.to(tl.int64)
    i_rest, i_state = tl.arange(0, RESTS)[:, None], tl.arange(0, STATES)
    i_oldest = tl.arange(0, CODES)[:, None, None]
    i_word, i_held = tl.arange(0, WORDS)[:, None], tl.arange(0, IN_WORD)[None, :, None]
    b_best = tl.where(i_rest == 0, 0.0, unreached) + tl.zeros((RESTS, ROWS), tl.float32)
    b_oldest = tl.zeros((RESTS, ROWS), tl.int32)
    for step in range(steps):
        if step % size == 0:  # noqa: SIM102 - in one condition it takes more registers
            if step > 0:
                b_ratio = tl.load(p_ratio + (step // size - 1) * rows + o_row, mask=m_row, other=1.0)
                b_best = b_best * b_ratio[None, :]
        b_x = tl.load(p_x + step * rows + o_row, mask=m_row, other=0.0)[None, None, :]
        # read at every step: registers hold costs
        b_slope = tl.reshape(tl.load(p_table + i_state), (RESTS, CODES, 1))
        b_bias = tl.reshape(tl.load(p_table + STATES + i_state), (RESTS, CODES, 1))
        b_cost = (b_slope * b_x + b_bias) + b_best[:, None, :]
        # the oldest code stands in the last bits of a cost
        b_bits = tl.reshape(b_cost, (CODES, RESTS, ROWS)).to(tl.int32, bitcast=True)
        b_best = tl.min(((b_bits & -CODES) | i_oldest).to(tl.float32, bitcast=True), 0)
        b_oldest = b_best.to(tl.int32, bitcast=True) & (CODES - 1)
        b_words = tl.sum(tl.reshape(b_oldest, (WORDS, IN_WORD, ROWS)) << (BITS * i_held), 1)
        tl.store(p_dropped + (step * WORDS + i_word) * rows + o_row[None, :], b_words, mask=m_row[None, :])
    i_last = tl.argmin(b_best, 0)
    b_oldest = tl.sum(tl.where(i_rest == i_last[None, :], b_oldest, 0), 0)
    tl.store(p_last + o_row, i_last + RESTS * b_oldest, mask=m_row)


@triton.jit(do_not_specialize=["rows", "steps", "stride", "last", "bits", "rests", "words", "log"])
def _back(p_dropped, p_last, p_path, rows, steps, stride, last, bits, rests, words, log, ROWS: tl.constexpr):
    """The states of ROWS rows, from the last one to the first.

    stride, last   between the steps of paths, and to the last of them
    words, log     of one step, and the logarithm of how many dropped codes are in one
    """
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < rows
    o_row = i_row.to(tl.int64)
    b_state = tl.load(p_last + o_row, mask=m_row, other=0)
    p_path += last
    for after in range(steps):
        tl.store(p_path + o_row, b_state.to(tl.int64), mask=m_row)
        p_path -= stride
        if after < steps - 1:
            b_rest = b_state >> bits
            o_dropped = ((steps - 2 - after) * words + (b_rest >> log)) * rows + o_row
            b_word = tl.load(p_dropped + o_dropped, mask=m_row, other=0)
            b_oldest = (b_word >> (bits * (b_rest & ((1 << log) - 1)))) & ((1 << bits) - 1)
            b_state = b_rest + rests * b_oldest
