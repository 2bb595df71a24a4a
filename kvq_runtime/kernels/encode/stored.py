"""Write what a layer stores where the decode kernel reads it: a step's tokens into the window, codes in operand order.

See store/storage.py and ops/fragment.py. Of `append` all programs read the counts; the last of them to have done so
writes the new one. A program is one warp, so that all of its lanes have read before one of them signals it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on
from kvq_runtime.ops.fragment import Order, Section, sections

COLUMNS = 512  # channels of a program of `append`
CONTAINERS = 1024  # of a step of a program of `arrange`


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


class Layout(NamedTuple):
    """The compiled form of an order: tiles and bytes of a sub-block, and its sections."""

    TILES: int
    BYTES: int
    SECTIONS: tuple[Section, ...]


def arrange(codes: Tensor, order: Order, rows: str) -> Tensor:
    lead = codes.shape[:-2]
    flat = codes if len(lead) == 3 else codes.reshape(-1, 1, 1, *codes.shape[-2:])
    strides = flat.stride()
    out = torch.empty(*lead, order.SUBS * order.BYTES, dtype=torch.uint8, device=codes.device)
    if codes.numel():
        with on(codes):
            _arrange[(flat[..., 0, 0].numel(), order.SUBS)](
                flat, out, *flat.shape[1:3], *strides,
                Layout(order.TILES, order.BYTES, tuple(sections(order))), rows == "tokens", CONTAINERS, **FUSED,
            )  # fmt: skip
    return out


@triton.jit
def _arrange(
    p_codes, p_out, second, third, s0, s1, s2, s_token, s_channel,
    S: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program per head's block and sub-block: N containers at a time, section by section."""
    i_head, i_sub = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_head = p_codes + i_head // (second * third) * s0 + i_head // third % second * s1 + i_head % third * s2
    p_sub = p_out + (i_head * tl.num_programs(1) + i_sub) * S.BYTES
    for number in tl.static_range(len(S.SECTIONS)):
        _section(p_head, p_sub, i_sub, s_token, s_channel, S, number, TOKENS, N)


@triton.jit
def _section(
    p_head, p_sub, i_sub, s_token, s_channel,
    S: tl.constexpr, NUMBER: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Collect the codes of each container of a section, slot by slot."""
    X: tl.constexpr = S.SECTIONS[NUMBER]
    START: tl.constexpr = X.START  # Triton 3.6 does not compute with a plain number
    EACH: tl.constexpr = X.EACH
    SLOTS: tl.constexpr = X.EACH * S.TILES
    COUNT: tl.constexpr = X.WORDS * 256
    for first in range(0, COUNT, N):
        o_c = first + tl.arange(0, N)
        m_c = o_c < COUNT
        o_g, o_t, o_r, o_w, o_h = o_c // 32 % 8, o_c // 8 % 4, o_c // 4 % 2, o_c // 2 % 2, o_c % 2
        o_row, o_column = o_g + 8 * o_r, 2 * o_t + o_h + 8 * o_w
        b_container = tl.zeros((N,), tl.int32)
        for slot in tl.static_range(SLOTS):
            o_token = (i_sub * S.TILES + slot % S.TILES) * 16 + (o_row if TOKENS else o_column)
            o_group = o_c // 256 * EACH + (X.FIRST + slot // S.TILES)
            p = p_head + o_token * s_token + (o_group * 16 + (o_column if TOKENS else o_row)) * s_channel
            b_code = tl.load(p, mask=m_c, other=0).to(tl.int32) >> X.UP
            b_container |= (b_code & ((1 << X.WIDTH) - 1)) << (X.WIDTH * slot)
        if X.BITS == 16:
            p_container = (p_sub + START).to(tl.pointer_type(tl.int16), bitcast=True)
            tl.store(p_container + o_c, b_container.to(tl.int16), mask=m_c)
        else:
            tl.store(p_sub + START + o_c, b_container.to(tl.uint8), mask=m_c)
