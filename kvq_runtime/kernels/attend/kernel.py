"""Split-K decode attention (flash decoding) over a layer's packed blocks, sinks and window, and the merge of splits.

One program per (batch row, KV head), tile of queries and split of the tokens. The query heads of a KV head, times the
query tokens, are the M columns of one tile, so that every byte is read once; where they are more, their tiles are
neighbours in the grid, which read the same bytes at the same time. The first EXACT splits are not of blocks: they share
the window, which is exact, and the first of them has the sinks, for slots that are encoded. The blocks are shared out
over the splits after them, whose number is fixed, each as long as the longest has to be; how many blocks there are is
read on the device, and splits that none are left for write nothing: so no split is waited for, and programs are few.
Tokens are rows and queries columns of the tensor cores' products, whose tiles are 16 rows and 8 columns at least: as
many tokens there always are, but seldom more queries.

The merge, by log-sum-exp, rotates back what came from the blocks, once, and adds the exact splits:

    out = (Σ 2^(lse_i - top) · mean_i) / Σ 2^(lse_i - top)

A pass over the splits loads levels and means side by side: no load waits for another one's result. It takes as many
splits as there are, up to the last of CLASSES; where they are few a program is one warp, for of a large batch there are
thousands of programs. Each of CHUNK places sums up every CHUNK-th split by its own largest level so far; places are
added up at the end, once. Splits that no block came to are neither written nor read.

How blocks are read is a SCAN: a jit function with the loop over the blocks of a split, in rounded.py, polar.py or
latent.py. Its
arguments are those of the kernel, and

    i_first, i_last   the split's blocks: scalars, i_first up to but without i_last
    i_b, i_h          batch row and KV head
    start             the row's first slot that is neither padding nor a sink
    part              Part of queries.py: where it writes its mean and sum

Names, in all files of this folder: p_ pointers · b_ tiles (blocks of numbers in registers) · i_ indices · o_ offsets
along a dimension · m_ masks of them · capitals, what is known at compile time: see arguments.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.attend import queries
from kvq_runtime.kernels.attend.arguments import COMPILED
from kvq_runtime.kernels.attend.layout import padded
from kvq_runtime.kernels.attend.queries import Part, Query, load_query
from kvq_runtime.kernels.encode.tile import FUSED, on

EXACT = tl.constexpr(4)  # splits of the window
PAGED_LENGTHS = tl.constexpr(4)  # numbers of a row of pages

LOADED = 1024  # elements of partial results that a warp loads at once
CLASSES = (16, 32, 64, 128)  # splits that a program takes at a time: as few as there are, at most the last
WARPS = 4  # of a program that rotates; of any other, at most
ROTATION = 16384  # elements of a rotation that it multiplies with at once


@triton.jit(do_not_specialize=["rows", "tokens", "splits"])
def attend(
    p_q, p_rotation, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, p_k_window, p_v_window, p_k_sinks,
    p_v_sinks, window_stride, p_starts, p_lengths, p_part, p_lse, rows, tokens, splits,
    L: tl.constexpr, SCAN: tl.constexpr, SCORES: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, XS: tl.constexpr,
):  # fmt: skip
    """Write each split's mean of the values and the log2 of its Σ 2^s; `merge` merges them.

    p_q              queries [B, Hq, tokens, D]
    p_rotation       of the keys, float16 [D, D], of layout.Layout, which rotates the queries too; or None
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
    SCORES           scores keys, in rounded.py; None where SCAN needs no such function
    KS, VS           settings of keys and values, for SCAN; XS TileSettings of exact tokens
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
        queries.store(b_exact, part, L, XS)
    else:
        i_first = (i_part - EXACT) * share(splits, blocks)
        i_last = tl.minimum(i_first + share(splits, blocks), blocks)
        if L.PAGED == 1:
            start = tl.where(start < 0, -L.SINKS, 0)  # without first tokens of its own, a row's slots count from 0
        if i_first < i_last:
            SCAN(
                Query(p_q, p_rotation, rows, first), q_exact, scale, p_rope, p_keys, p_values, p_key_lookup,
                p_value_lookup, i_first, i_last, i_b, i_h, start + L.SINKS, part, L, SCORES, KS, VS,
            )  # fmt: skip


@triton.jit
def share(splits, blocks):
    """Return blocks of a split, at least 1; the last that has any may have fewer."""
    return tl.maximum(tl.cdiv(blocks, splits), 1)


@triton.jit
def _exact(
    q, scale, p_k_window, p_v_window, p_k_sinks, p_v_sinks, window_stride, p_lengths, encoded, i_split, i_b, i_h,
    start, tokens, L: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Attend to one of EXACT shares of the window, the first to the sinks too: the state of queries.py.

    A query token sees no later one. `encoded` are the tokens of all blocks, the window's first slot. `start` is the
    row's first real slot; where L is PAGED, its row of the sinks' buffer.
    """
    N: tl.constexpr = 32
    o_d = tl.arange(0, S.P)
    m_d = o_d < L.D
    # products in the model's own dtype; the interpreter has none in bfloat16
    DTYPE: tl.constexpr = p_k_window.dtype.element_ty if COMPILED else tl.float32
    b_q = load_query(q, 1.0, i_b * L.H + i_h, o_d, m_d, L).to(DTYPE)
    b_state = queries.empty(N, L, S)
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
            b_state = _tile(b_state, b_q, scale, p_k_sinks, p_v_sinks, o_x, m_t, m_d, m_t[:, None], L)
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
        m_seen = m_t[:, None] & (o_t[:, None] <= o_latest[None, :])
        b_state = _tile(b_state, b_q, scale, p_k_window, p_v_window, o_x, m_t, m_d, m_seen, L)
    return b_state


@triton.jit
def _tile(b_state, b_q, scale, p_k, p_v, o_x, m_t, m_d, m_seen, L: tl.constexpr):
    """Return the state after a tile of exact tokens at o_x [N, P], of which each query sees m_seen [N, M]."""
    b_k = tl.load(p_k + o_x, mask=m_t[:, None] & m_d[None, :], other=0.0).to(b_q.dtype)
    b_v = tl.load(p_v + o_x, mask=m_t[:, None] & m_d[None, :], other=0.0).to(b_q.dtype)
    b_s = queries.capped(tl.dot(b_k, b_q, input_precision="ieee") * scale, L)
    return queries.add(b_state, tl.where(m_seen, b_s, float("-inf")), (b_v,), ())


def merge_parts(
    part: Tensor,
    part_lse: Tensor,
    rotation: Tensor | None,
    mean: Tensor | None,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launch the merge: its arguments are the kernel's; `out` is [B, Hq, tokens, D]."""
    lines, parts, rows, size = part.shape
    splits = parts - EXACT.value
    wide, columns, chunk, warps = merge_sizes(size, splits, rotation is not None)
    with on(part):
        merge[(lines, rows, triton.cdiv(size, wide))](
            part, part_lse, rotation, mean, lengths, out, lse, splits, rows,
            lines // len(out), size, wide, columns, chunk, int(lengths.ndim == 2),
            int(rotation is not None and rotation.ndim == 3),
            num_warps=warps, maxnreg=255, **FUSED,
        )  # fmt: skip


def merge_sizes(size: int, splits: int, rotates: bool) -> tuple[int, int, int, int]:
    """Return (channels of a program, channels that it writes and splits that it takes at a time, warps).

    A rotation needs all channels of a head. Splits of one of CLASSES share a merge, so that few are compiled.
    """
    wide, some = padded(size), next((count for count in CLASSES if splits <= count), CLASSES[-1])
    if rotates:
        return wide, min(wide, ROTATION // wide), min(some, WARPS * LOADED // wide), WARPS
    wide = min(wide, 64 if some == CLASSES[0] else 32)
    return wide, wide, some, max(1, some * wide // LOADED)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge(
    p_part, p_lse, p_rotation, p_mean, p_lengths, p_out, p_out_lse, splits, rows,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One program per (batch row, KV head), query row and WIDE channels, CHUNK splits at a time.

    p_part, p_lse   float32 [B · H, EXACT + splits, rows, D] and [B · H, rows, EXACT + splits], as `attend` writes them
    p_rotation      of the values: float16 [D, D], of layout.Layout, or None; not of the exact splits; EACH: [H, D, D],
                    one of each KV head
    p_mean          of the values, float32 [H, D], or None; not of the exact splits
    p_lengths       int32 [3], the first: encoded blocks; PAGED: [B, 4], of each row
    p_out           [B · H, rows, D] in the queries' dtype
    p_out_lse       float32 [B · H, rows]
    rows            of queries, of each KV head
    WIDE            where there is a rotation D, padded to a power of two; else COLUMNS
    COLUMNS         channels that are rotated and written at a time
    """
    i_bh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = EXACT + splits
    p_lse += (i_bh * rows + i_r) * parts
    p_part += (i_bh * parts * rows + i_r) * D
    first = tl.program_id(2) * WIDE
    o_d, o_e = first + tl.arange(0, WIDE), tl.arange(0, EXACT)
    b_exact = tl.load(p_lse + o_e)
    if PAGED == 1:
        p_lengths += i_bh // H * PAGED_LENGTHS
    blocks = tl.load(p_lengths)
    used = tl.cdiv(blocks, share(splits, blocks))
    b_top, b_total, b_sums = _blocks(p_part + EXACT * rows * D + o_d, p_lse + EXACT, used, rows * D, o_d < D, CHUNK)
    higher = tl.maximum(tl.max(b_top, 0), tl.max(b_exact, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    b_fade, b_weights = tl.exp2(b_top - base), tl.exp2(b_exact - base)
    weight, b_mixed = tl.sum(b_total * b_fade, 0), tl.sum(b_sums * b_fade[:, None], 0)
    total = weight + tl.sum(b_weights, 0)
    some = tl.where(total > 0, total, 1.0)
    if EACH == 1:
        p_rotation += i_bh % H * (D * D)
    for i in tl.static_range(WIDE // COLUMNS):
        o_c = first + i * COLUMNS + tl.arange(0, COLUMNS)
        m_c = o_c < D
        p = p_part + o_e[:, None].to(tl.int64) * rows * D + o_c[None, :]
        b_out = tl.sum(b_weights[:, None] * tl.load(p, mask=m_c[None, :], other=0.0), 0)
        if p_rotation is None:
            b_out += b_mixed
        else:
            m = (o_d < D)[:, None] & m_c[None, :]
            b_back = tl.load(p_rotation + o_d[:, None] * D + o_c[None, :], mask=m, other=0.0).to(tl.float32)
            b_out += tl.sum(b_mixed[:, None] * b_back, 0)
        if p_mean is not None:
            b_out += weight * tl.load(p_mean + i_bh % H * D + o_c, mask=m_c, other=0.0)
        p = p_out + (i_bh * rows + i_r) * D + o_c
        tl.store(p, (b_out / some).to(p_out.dtype.element_ty), mask=m_c)
    if tl.program_id(2) == 0:
        tl.store(p_out_lse + i_bh * rows + i_r, tl.where(total > 0, base + tl.log2(some), float("-inf")))


@triton.jit
def _blocks(p_part, p_lse, used, stride, m_d, CHUNK: tl.constexpr):
    """(top, Σ 2^(lse - top), Σ 2^(lse - top) · mean) of `used` splits, every CHUNK-th: float32 [CHUNK], [CHUNK] and
    [CHUNK, channels].

    p_part, p_lse   of the first split, [channels] and a scalar; means of the next one are `stride` elements further
    m_d             which channels there are
    """
    b_top = tl.full((CHUNK,), float("-inf"), tl.float32)
    b_total = tl.zeros((CHUNK,), tl.float32)
    b_sums = tl.zeros((CHUNK, m_d.shape[0]), tl.float32)
    for i in range(0, used, CHUNK):
        o_s = i + tl.arange(0, CHUNK)
        m_s = o_s < used
        b_level = tl.load(p_lse + o_s, mask=m_s, other=float("-inf"))
        p = p_part[None, :] + o_s[:, None].to(tl.int64) * stride
        b_mean = tl.load(p, mask=m_s[:, None] & m_d[None, :], other=0.0)
        b_higher = tl.maximum(b_top, b_level)
        b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
        b_fade, b_weight = tl.exp2(b_top - b_base), tl.exp2(b_level - b_base)
        b_total = b_total * b_fade + b_weight
        b_sums = b_sums * b_fade[:, None] + b_weight[:, None] * b_mean
        b_top = b_higher
    return b_top, b_total, b_sums
