"""Split-K decode attention (flash decoding) over a layer's packed blocks, sinks and window.

One program per (batch row, KV head), tile of queries and split of the tokens. The query heads of a KV head, times the
query tokens, are the M columns of one tile, so that every byte is read once; where they are more, their tiles are
neighbours in the grid, which read the same bytes at the same time. The first EXACT splits are not of blocks: they share
the window, which is exact, and the first of them has the sinks, for slots that are encoded. The blocks are shared out
over the splits after them, whose number is fixed, each as long as the longest has to be; how many blocks there are is
read on the device, and splits that none are left for write nothing: so no split is waited for, and programs are few.
Tokens are rows and queries columns of the tensor cores' products, whose tiles are 16 rows and 8 columns at least: as
many tokens there always are, but seldom more queries.

Names, in all files of this folder: p_ pointers · b_ tiles (blocks of numbers in registers) · i_ indices · o_ offsets
along a dimension · m_ masks of them · capitals, what is known at compile time: see settings.py.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import softmax
from kvq_runtime.kernels.attend.query import Query, load_query
from kvq_runtime.kernels.attend.settings import COMPILED
from kvq_runtime.kernels.attend.softmax import Part

EXACT = tl.constexpr(4)  # splits of the window
PAGED_LENGTHS = tl.constexpr(4)  # numbers of a row of pages


@triton.jit(do_not_specialize=["rows", "tokens", "splits"])
def attend(
    p_q, p_rotation, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, p_k_window, p_v_window, p_k_sinks,
    p_v_sinks, window_stride, p_starts, p_lengths, p_part, p_lse, rows, tokens, splits,
    L: tl.constexpr, SCAN: tl.constexpr, READ_KEYS: tl.constexpr, KS: tl.constexpr, READ_VALUES: tl.constexpr,
    VS: tl.constexpr, XS: tl.constexpr,
):  # fmt: skip
    """Write each split's mean of the values and the log2 of its Σ 2^s; merge.py merges them.

    p_q              queries [B, Hq, tokens, D]
    p_rotation       of the keys, float16 [D, D], of host.Encoded, which rotates the queries too; or None
    scale            of the scores, times log2 e
    p_rope           RopePointers, or None
    p_keys, p_values                  block tables, int64; or Pages
    p_key_lookup, p_value_lookup      what codes are looked up in, or None
    p_k_window, p_v_window            buffers [B, tokens, H · D], `window_stride` elements a row
    p_k_sinks, p_v_sinks              [B, SINKS, H · D]
    p_starts         int32 [B], the first real slot of each row
    p_lengths        int32 [3]: encoded blocks, the window's first place in its buffer, its tokens
    of an L that is PAGED, which has no padding, instead:
    p_k_window, p_v_window            buffers of any rows [tokens, H · D], `window_stride` elements apart
    p_k_sinks, p_v_sinks              buffers of any rows [SINKS, H · D], 2 · SINKS · H · D elements apart
    p_starts         None
    p_lengths        int32 [B, 4]: encoded pages, the row of the window's buffer, its tokens, the row of the sinks'
                     buffer, -1: this row has none
    and always:
    p_part, p_lse    float32 [B · H, EXACT + splits, rows, D] and [B · H, rows, EXACT + splits]
    rows, tokens     query heads of a KV head times query tokens; the latter alone
    splits           parts that the blocks are cut into
    SCAN             the loop over a split's blocks: rounded.py, per_token.py
    READ_KEYS        scores keys, in rounded.py; reads a tile of them, in per_token.py
    READ_VALUES      reads a tile of values, in per_token.py
    XS               TileSettings of exact tokens
    """
    first = tl.program_id(0) * L.M
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // L.H, i_bh % L.H
    i_part = tl.program_id(2)
    if L.PAGED == 1:
        p_lengths += i_b * PAGED_LENGTHS
    blocks = tl.load(p_lengths)
    start = tl.load(p_lengths + 3) if L.PAGED == 1 else tl.load(p_starts + i_b)
    q_exact = Query(p_q, None, rows, first)
    part = Part(p_part, p_lse, i_bh, i_part, EXACT + splits, rows, first)
    if i_part < EXACT:
        b_exact = _exact(
            q_exact, scale, p_k_window, p_v_window, p_k_sinks, p_v_sinks, window_stride, p_lengths, blocks * L.T,
            i_part, i_b, i_h, start, tokens, L, XS,
        )  # fmt: skip
        softmax.store(b_exact, part, L, XS)
    else:
        i_first = (i_part - EXACT) * share(splits, blocks)
        i_last = tl.minimum(i_first + share(splits, blocks), blocks)
        if L.PAGED == 1:
            start = tl.where(start < 0, -L.SINKS, 0)  # without first tokens of its own, a row's slots count from 0
        if i_first < i_last:
            SCAN(
                Query(p_q, p_rotation, rows, first), q_exact, scale, p_rope, p_keys, p_values, p_key_lookup,
                p_value_lookup, i_first, i_last, i_b, i_h, start + L.SINKS, part, L, READ_KEYS, KS, READ_VALUES, VS,
            )  # fmt: skip


@triton.jit
def share(splits, blocks):
    """Blocks of a split, at least 1; the last that has any may have fewer."""
    return tl.maximum(tl.cdiv(blocks, splits), 1)


@triton.jit
def _exact(
    q, scale, p_k_window, p_v_window, p_k_sinks, p_v_sinks, window_stride, p_lengths, encoded, i_split, i_b, i_h,
    start, tokens, L: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Attend to one of EXACT shares of the window, the first to the sinks too: the state of softmax.py.

    A query token sees no later one. `encoded` are the tokens of all blocks, the window's first slot. `start` is the
    row's first real slot; where L is PAGED, its row of the sinks' buffer.
    """
    N: tl.constexpr = 32
    o_d = tl.arange(0, S.P)
    m_d = o_d < L.D
    # products in the model's own dtype; the interpreter has none in bfloat16
    DTYPE: tl.constexpr = p_k_window.dtype.element_ty if COMPILED else tl.float32
    b_q = load_query(q, 1.0, i_b * L.H + i_h, o_d, m_d, L).to(DTYPE)
    b_top, b_total, b_sums = softmax.empty(N, L, S)
    o_hd = i_h * L.D + o_d
    if L.SINKS > 0:
        for i in range(0, L.SINKS if i_split == 0 else 0, N):
            o_t = i + tl.arange(0, N)
            if L.PAGED == 1:
                m_t = (o_t < L.SINKS) & (o_t < tl.where(start < 0, 0, encoded))
                o_x = (start.to(tl.int64) * (2 * L.SINKS) + o_t)[:, None] * (L.H * L.D) + o_hd[None, :]
            else:
                m_t = (o_t < L.SINKS) & (start + o_t < encoded)
                o_x = (i_b * L.SINKS + o_t)[:, None] * (L.H * L.D) + o_hd[None, :]
            b_k = tl.load(p_k_sinks + o_x, mask=m_t[:, None] & m_d[None, :], other=0.0)
            b_v = tl.load(p_v_sinks + o_x, mask=m_t[:, None] & m_d[None, :], other=0.0)
            b_s = tl.dot(b_k.to(DTYPE), b_q, input_precision="ieee") * scale
            b_s = tl.where(m_t[:, None], b_s, float("-inf"))
            b_top, b_total, b_sums = softmax.add(b_top, b_total, b_sums, b_s, (b_v.to(DTYPE),), ())
    place, count = tl.load(p_lengths + 1), tl.load(p_lengths + 2)
    o_latest = count - tokens + (q.first + tl.arange(0, L.M)) % tokens  # in the window, of each query token
    each = tl.cdiv(count, EXACT)
    last = tl.minimum((i_split + 1) * each, count)
    for i in tl.range(i_split * each, last, N, num_stages=2):
        o_t = i + tl.arange(0, N)
        if L.PAGED == 1:
            m_t = o_t < last
            o_x = place.to(tl.int64) * window_stride + o_t[:, None] * (L.H * L.D) + o_hd[None, :]
        else:
            m_t = (o_t < last) & (encoded + o_t >= start)
            o_x = i_b * window_stride + (place + o_t)[:, None].to(tl.int64) * (L.H * L.D) + o_hd[None, :]
        b_k = tl.load(p_k_window + o_x, mask=m_t[:, None] & m_d[None, :], other=0.0)
        b_v = tl.load(p_v_window + o_x, mask=m_t[:, None] & m_d[None, :], other=0.0)
        b_s = tl.dot(b_k.to(DTYPE), b_q, input_precision="ieee") * scale
        b_s = tl.where(m_t[:, None] & (o_t[:, None] <= o_latest[None, :]), b_s, float("-inf"))
        b_top, b_total, b_sums = softmax.add(b_top, b_total, b_sums, b_s, (b_v.to(DTYPE),), ())
    return b_top, b_total, b_sums
