"""Split-K decode attention to keys and values that are stored as angles, N tokens at a time.

A scan is a jit function of this file or rounded.py, which the kernel gets as a compile-time argument (SCAN): the
loop over the blocks of a split. Its arguments are those of the kernel (kernel.py), and

    i_first, i_last   the split's blocks: scalars, i_first up to but without i_last
    i_b, i_h          batch row and KV head
    start             the row's first slot that is neither padding nor a sink
    part              where it writes what it found: Part of queries.py

A reader is a jit function of read_polar.py, likewise (READ_KEYS, READ_VALUES): it reads a tile of tokens
whose codes lie along the channels of each head.

    b_tiles, b_numbers = READ(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L, S)

    p_table     block table, int64, see block_table.py
    p_lookup    what codes are looked up in, in the reader's own form; or None
    o_t, m_t    tokens of the block [N], and which of them are there
    L, S        LayerSettings and the reader's own

`b_tiles` is a tuple of S.SLOTS tiles float16 [N, S.P], slot i the channels [i · COLUMNS, (i + 1) · COLUMNS).
`b_numbers` is (scale,) or (), float32 [N]:   x̂[t, c] = scale[t] · tile[t, c]

So neither a dot product with the query, slot by slot, nor a sum over tokens, weighted by probability times scale,
multiplies an element.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import queries, rope


@triton.jit
def post_rope(
    q, q_exact, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, i_first, i_last, i_b, i_h, start,
    part, L: tl.constexpr, READ_KEYS: tl.constexpr, KS: tl.constexpr, READ_VALUES: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Keys after RoPE, or without it; `p_rope` is not None if their mean was removed."""
    N: tl.constexpr = L.N
    M: tl.constexpr = L.M
    o_c = tl.arange(0, KS.P)
    b_q = ()
    for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
        o_d = slot * KS.COLUMNS + o_c
        m_d = (o_c < KS.COLUMNS) & (o_d < L.D)
        b_slot = queries.load_query(q, scale, i_b * L.H + i_h, o_d, m_d, L)
        b_q = b_q + (b_slot.to(tl.float16),)
    i_first = tl.maximum(i_first, start // L.T)
    b_top, b_total, b_sums = queries.empty(N, L, VS)
    for i_block in range(i_first, i_last):
        b_mean = rope.mean_of_block(q_exact, scale, p_rope, i_b, i_h, i_block, L)
        for i_tile in tl.range((L.T + N - 1) // N, disable_licm=True):
            o_t = i_tile * N + tl.arange(0, N)
            m_t = o_t < L.T
            b_tiles, b_numbers = READ_KEYS(p_keys, p_key_lookup, i_block, i_b, i_h, o_t, m_t, L, KS)
            b_s = tl.zeros((N, M), tl.float32)
            for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
                b_s = tl.dot(b_tiles[slot], b_q[slot], b_s)
            if len(b_numbers) > 0:
                b_s = b_s * b_numbers[0][:, None]
            b_s = queries.capped(rope.add_mean(b_s, b_mean, p_rope, i_tile, i_block, L), L)
            b_s = tl.where((m_t & (i_block * L.T + o_t >= start))[:, None], b_s, float("-inf"))
            b_tiles, b_numbers = READ_VALUES(p_values, p_value_lookup, i_block, i_b, i_h, o_t, m_t, L, VS)
            b_top, b_total, b_sums = queries.add(b_top, b_total, b_sums, b_s, b_tiles, b_numbers)
    queries.store((b_top, b_total, b_sums), part, L, VS)


@triton.jit
def load_number(p_number, o_t, m_t, i_h, L: tl.constexpr):
    """A float16 per token and head: float32 [N]."""
    return tl.load(p_number + o_t * L.H + i_h, mask=m_t, other=0.0).to(tl.float32)
