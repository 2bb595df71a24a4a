"""Attend to a layer's encoded blocks, sinks and window: one program per (row, KV head) and split of the tokens.

All query heads of a KV head, times the query tokens, are the M rows of one tile, so that every byte is read once. The
blocks are shared out evenly over a fixed number of splits; how many blocks there are is read on the device. The last
EXACT splits are not of blocks: they share the window, exact, and the first of them has the sinks, for slots that are
encoded. Splits may be empty. Tokens are rows and queries columns of the tensor cores' products, whose tiles are 16 rows
and 8 columns at least: as many tokens there always are, but seldom more queries.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels import softmax
from kvq_runtime.kernels.read import load_query

EXACT = tl.constexpr(4)  # splits of the window


@triton.jit
def attend(
    q, q_exact, scale, turn, keys, values, lookup, lookups, k_window, v_window, k_sinks, v_sinks, window_row, starts,
    lengths, part, lse,
    H: tl.constexpr, G: tl.constexpr, TQ: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
    SPLITS: tl.constexpr, encoded: tl.constexpr, KREAD: tl.constexpr, KSET: tl.constexpr, VREAD: tl.constexpr,
    VSET: tl.constexpr, XSET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """`lengths` is (encoded blocks, the window's first place in its buffer, its tokens); XSET those of exact tokens."""
    line = tl.program_id(0).to(tl.int64)
    row, head = line // H, line % H
    split = tl.program_id(1)
    blocks = tl.load(lengths)
    start = tl.load(starts + row)  # the row's first real slot
    if split < SPLITS:
        each = (blocks + SPLITS - 1) // SPLITS
        first = tl.minimum(split * each, blocks)
        last = tl.minimum(first + each, blocks)
        blocks_state = encoded(
            q, q_exact, scale, turn, keys, values, lookup, lookups, first, last, row, head, start + SINKS, H, G, TQ, M,
            N, KREAD, KSET, VREAD, VSET, COMPILED,
        )  # fmt: skip
        softmax.store(blocks_state, part, lse, line * (SPLITS + EXACT) + split, G * TQ, M, VSET)
    else:
        exact_state = _exact(
            q_exact, scale, k_window, v_window, k_sinks, v_sinks, window_row, lengths, blocks * KSET[5], split - SPLITS,
            row, head, start, H, G, TQ, M, SINKS, XSET, COMPILED,
        )  # fmt: skip
        softmax.store(exact_state, part, lse, line * (SPLITS + EXACT) + split, G * TQ, M, XSET)


@triton.jit
def _exact(
    q, scale, k_window, v_window, k_sinks, v_sinks, window_row, lengths, coded, split, row, head,
    start, H: tl.constexpr, G: tl.constexpr, TQ: tl.constexpr, M: tl.constexpr, SINKS: tl.constexpr,
    SET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Attend to a share of sinks and window as they are; a query token sees no later one."""
    N: tl.constexpr = 32
    d = tl.arange(0, SET[2])
    there = d < SET[3]
    # products in the model's own dtype; the interpreter has none in bfloat16
    DTYPE: tl.constexpr = k_window.dtype.element_ty if COMPILED else tl.float32
    query = load_query(q, 1.0, row * H + head, d, there, TQ, G, M, SET[3]).to(DTYPE)
    top, total, low, sums = softmax.empty(M, N, SET[2], 1)
    channel = head * SET[3] + d
    if SINKS > 0:
        for i in range(0, SINKS if split == 0 else 0, N):
            t = i + tl.arange(0, N)
            seen = (t < SINKS) & (start + t < coded)
            at = (row * SINKS + t)[:, None] * (H * SET[3]) + channel[None, :]
            key = tl.load(k_sinks + at, mask=seen[:, None] & there[None, :], other=0.0)
            value = tl.load(v_sinks + at, mask=seen[:, None] & there[None, :], other=0.0)
            s = tl.dot(key.to(DTYPE), query, input_precision="ieee") * scale
            s = tl.where(seen[:, None], s, float("-inf"))
            top, total, low, sums = softmax.add(top, total, low, sums, s, (value.to(DTYPE),), ())
    place, count = tl.load(lengths + 1), tl.load(lengths + 2)
    latest = count - TQ + tl.arange(0, M) % TQ  # in the window, of each query token
    each = tl.cdiv(count, EXACT)
    last = tl.minimum((split + 1) * each, count)
    for i in tl.range(split * each, last, N, num_stages=2):
        t = i + tl.arange(0, N)
        seen = (t < last) & (coded + t >= start)
        at = row * window_row + (place + t)[:, None].to(tl.int64) * (H * SET[3]) + channel[None, :]
        key = tl.load(k_window + at, mask=seen[:, None] & there[None, :], other=0.0)
        value = tl.load(v_window + at, mask=seen[:, None] & there[None, :], other=0.0)
        s = tl.dot(key.to(DTYPE), query, input_precision="ieee") * scale
        s = tl.where(seen[:, None] & (t[:, None] <= latest[None, :]), s, float("-inf"))
        top, total, low, sums = softmax.add(top, total, low, sums, s, (value.to(DTYPE),), ())
    return top, total, low, sums
