"""Split-K decode attention to keys whose codes lie along the tokens of a block, a group at a time: KIVI's and SQuat's.

A group of a block is opened once: its bytes are read, per-channel steps scale the query, lows enter as q·low, and an
element costs its unpacking alone. Each stream of codes is a run of consecutive tokens: a slot of ChannelSettings. Where
streams are short, and would be padded to a tile, COLUMNS is GROUP: all streams of a group are unpacked into one tile,
at more instructions per code but none for tokens that are not there.

Before RoPE a tile is decoded and rotated by a constant [K, T] table as if every block began at position 0; the query is
rotated back by the block's position, see rope.py. What a scan is, see per_token.py.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import rope, softmax, unpack
from kvq_runtime.kernels.attend.block_table import CODES, LOW, SCALE, field_of
from kvq_runtime.kernels.attend.per_group import codes_of_groups
from kvq_runtime.kernels.attend.query import load_query
from kvq_runtime.kernels.attend.read import scale_of_slot


@triton.jit
def _load_group(p_table, i_block, i_group, i_b, i_h, o_d, m_d, L: tl.constexpr, S: tl.constexpr):
    """One group of channels o_d: (runs of bytes, a tuple of uint8 [len(o_d), P]; step; low), float32 [len(o_d)] each.

    Where COLUMNS is GROUP, the codes themselves are the one run, float16.
    """
    FIELDS: tl.constexpr = 2 + S.HAS_LOW
    GROUPS: tl.constexpr = L.T // S.GROUP
    BYTES: tl.constexpr = S.GROUP * S.BITS // 8
    NUMBERS: tl.constexpr = L.H * L.D * GROUPS * 2
    p_codes = field_of(p_table, i_block, i_b, CODES, FIELDS, L.H * L.D * GROUPS * BYTES, tl.uint8)
    o_groups = (i_h * L.D + o_d) * GROUPS + i_group
    b_runs = ()
    if S.COLUMNS == S.GROUP:
        b_code = codes_of_groups((p_codes + o_groups * BYTES)[:, None], m_d[:, None], S.GROUP, S.BITS)
        b_runs = (tl.reshape(b_code, (o_d.shape[0], S.GROUP)).to(tl.float16),)
    else:
        o_c = tl.arange(0, S.P)[None, :]
        for run in tl.static_range(BYTES // S.COLUMNS):
            p = p_codes + o_groups[:, None] * BYTES + run * S.COLUMNS + o_c
            b_runs = b_runs + (tl.load(p, mask=m_d[:, None] & (o_c < S.COLUMNS), other=0),)
    p_step = field_of(p_table, i_block, i_b, SCALE, FIELDS, NUMBERS, tl.float16)
    b_step = tl.load(p_step + o_groups, mask=m_d, other=0.0)
    b_step = b_step.to(tl.float32)
    if S.HAS_LOW == 1:
        p_low = field_of(p_table, i_block, i_b, LOW, FIELDS, NUMBERS, tl.float16)
        b_low = tl.load(p_low + o_groups, mask=m_d, other=0.0)
        b_low = b_low.to(tl.float32)
    else:
        b_low = b_step * (-((1 << S.BITS) - 1) / 2)
    return b_runs, b_step, b_low


@triton.jit
def post_rope(
    p_q, p_q_exact, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, i_first, i_last, i_b, i_h, start,
    L: tl.constexpr, READ_KEYS: tl.constexpr, KS: tl.constexpr, READ_VALUES: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Keys after RoPE, or without it; `p_rope` is given where their mean was removed."""
    o_d = tl.arange(0, KS.WIDE)
    m_d = o_d < L.D
    b_q = load_query(p_q, scale, i_b * L.H + i_h, o_d, m_d, L)
    i_first = tl.maximum(i_first, start // L.T)
    b_top, b_total, b_low, b_sums = softmax.empty(KS.P, L, VS)
    for i_block in tl.range(i_first, i_last, disable_licm=True):
        b_mean = rope.mean_of_block(p_q_exact, scale, p_rope, i_b, i_h, i_block, L)
        for i_group in range(L.T // KS.GROUP):
            b_runs, b_step, b_lows = _load_group(p_keys, i_block, i_group, i_b, i_h, o_d, m_d, L, KS)
            if L.M > 8 or p_rope is not None:  # in registers it would leave too few
                b_q = load_query(p_q, scale, i_b * L.H + i_h, o_d, m_d, L)
            b_base = tl.sum(b_q * b_lows[:, None], 0)
            b_scaled = (b_q * b_step[:, None]).to(tl.float16)
            o_c = tl.arange(0, KS.P)
            for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
                b_s = tl.dot(tl.trans(_codes(b_runs, slot, KS)), b_scaled)
                b_s = b_s * (1 / scale_of_slot(slot, KS)) + b_base[None, :]
                o_t = i_group * KS.GROUP + slot * KS.COLUMNS + o_c
                b_s = rope.add_mean(b_s, b_mean, p_rope, o_t, o_c < KS.COLUMNS, L)
                m_t = (o_c < KS.COLUMNS) & (i_block * L.T + o_t >= start)
                b_tiles, b_numbers = READ_VALUES(p_values, p_value_lookup, i_block, i_b, i_h, o_t, m_t, L, VS)
                b_s = tl.where(m_t[:, None], b_s, float("-inf"))
                b_top, b_total, b_low, b_sums = softmax.add(b_top, b_total, b_low, b_sums, b_s, b_tiles, b_numbers)
    return b_top, b_total, b_low, b_sums


@triton.jit
def pre_rope(
    p_q, p_q_exact, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, i_first, i_last, i_b, i_h, start,
    L: tl.constexpr, READ_KEYS: tl.constexpr, KS: tl.constexpr, READ_VALUES: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Keys before RoPE, which `p_rope` is for; a mean that was removed joins the lows."""
    HALF: tl.constexpr = L.D // 2
    o_k = tl.arange(0, KS.WIDE // 2)
    m_k = o_k < HALF
    i_bh, i_first = i_b * L.H + i_h, tl.maximum(i_first, start // L.T)
    b_left = load_query(p_q, scale, i_bh, o_k, m_k, L)
    b_right = load_query(p_q, scale, i_bh, HALF + o_k, m_k, L)
    b_left, b_right = rope.to_block(b_left, b_right, o_k, p_rope, i_b, i_first, HALF)
    b_top, b_total, b_low, b_sums = softmax.empty(KS.P, L, VS)
    o_c = tl.arange(0, KS.P)
    for i_block in tl.range(i_first, i_last, disable_licm=True):
        for i_group in range(L.T // KS.GROUP):
            b_runs1, b_step1, b_low1 = _load_group(p_keys, i_block, i_group, i_b, i_h, o_k, m_k, L, KS)
            b_runs2, b_step2, b_low2 = _load_group(p_keys, i_block, i_group, i_b, i_h, HALF + o_k, m_k, L, KS)
            if p_rope.mean is not None:
                b_low1 += tl.load(p_rope.mean + i_h * L.D + o_k, mask=m_k, other=0.0)
                b_low2 += tl.load(p_rope.mean + i_h * L.D + HALF + o_k, mask=m_k, other=0.0)
            b_q1, b_q2 = b_left.to(tl.float16), b_right.to(tl.float16)
            for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
                o_t = i_group * KS.GROUP + slot * KS.COLUMNS + o_c
                m_t = (o_c < KS.COLUMNS) & (i_block * L.T + o_t >= start)
                p = p_rope.block + o_k[:, None] * (2 * L.T) + o_t[None, :]
                b_cos = tl.load(p, mask=m_k[:, None] & (o_c < KS.COLUMNS)[None, :], other=0.0)
                b_sin = tl.load(p + L.T, mask=m_k[:, None] & (o_c < KS.COLUMNS)[None, :], other=0.0)
                b_k1 = _decoded(b_runs1, b_step1, b_low1, slot, KS)
                b_k2 = _decoded(b_runs2, b_step2, b_low2, slot, KS)
                b_rotated2 = tl.trans(b_k1 * b_sin + b_k2 * b_cos)
                b_s = tl.dot(b_rotated2, b_q2, tl.dot(tl.trans(b_k1 * b_cos - b_k2 * b_sin), b_q1))
                b_tiles, b_numbers = READ_VALUES(p_values, p_value_lookup, i_block, i_b, i_h, o_t, m_t, L, VS)
                b_s = tl.where(m_t[:, None], b_s, float("-inf"))
                b_top, b_total, b_low, b_sums = softmax.add(b_top, b_total, b_low, b_sums, b_s, b_tiles, b_numbers)
        b_left, b_right = rope.to_next_block(b_left, b_right, o_k, p_rope, HALF)
    return b_top, b_total, b_low, b_sums


@triton.jit
def _codes(b_runs, SLOT: tl.constexpr, S: tl.constexpr):
    """The codes of one slot times `scale_of_slot`: float16 [K, P]."""
    return b_runs[0] if S.COLUMNS == S.GROUP else unpack.codes_float16(b_runs, SLOT, S.BITS)


@triton.jit
def _decoded(b_runs, b_step, b_low, SLOT: tl.constexpr, S: tl.constexpr):
    """The channels of one slot: float16 [K, P]."""
    b_step = (b_step * (1 / scale_of_slot(SLOT, S))).to(tl.float16)[:, None]
    return _codes(b_runs, SLOT, S) * b_step + b_low.to(tl.float16)[:, None]
