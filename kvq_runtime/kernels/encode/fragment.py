"""Order codes as the tensor core takes them; see ops/fragment.py."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on
from kvq_runtime.ops.fragment import Order, Section, sections

CONTAINERS = 1024  # of a step of a program


class Layout(NamedTuple):
    """The compiled form of an order: tiles and bytes of a sub-block, and its sections."""

    TILES: int
    BYTES: int
    SECTIONS: tuple[Section, ...]


def arrange(codes: Tensor, order: Order, rows: str) -> Tensor:
    lead, strides = codes.shape[:-2], codes.stride()
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
