"""Attend to keys whose codes lie along the channels of each head, N tokens at a time; see read.py."""

import triton
import triton.language as tl

from kvq_runtime.kernels import softmax
from kvq_runtime.kernels import turn as turns
from kvq_runtime.kernels.read import load_query, weight


@triton.jit
def plain(
    q, q_exact, scale, turn, keys, values, lookup, lookups, first, last, row, head, start, H: tl.constexpr,
    G: tl.constexpr, TQ: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KREAD: tl.constexpr, KSET: tl.constexpr,
    VREAD: tl.constexpr, VSET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `first` to `last`."""
    d = tl.arange(0, KSET[2])
    whole = tl.zeros((M,), tl.float32)
    slices = ()
    for slot in tl.static_range(tl.constexpr(KSET[0])):
        channel = slot * KSET[1] + d
        here = (d < KSET[1]) & (channel < KSET[3])
        part = load_query(q, scale, row * H + head, channel, here, TQ, G, M, KSET[3])
        whole += tl.sum(part, 0)
        slices = slices + ((part * (1 / weight(slot, KSET))).to(tl.float16),)
    first = tl.maximum(first, start // KSET[5])
    top, total, low, sums = softmax.empty(M, N, VSET[2], VSET[0])
    for block in range(first, last):
        mean = turns.mean_opened(q_exact, scale, turn, row, head, block, H, G, TQ, M, KSET[3])
        for tile in tl.range((KSET[5] + N - 1) // N, disable_licm=True):
            t = tile * N + tl.arange(0, N)
            inside = t < KSET[5]
            tiles, own = KREAD(keys, lookup, block, row, head, t, inside, KSET, COMPILED)
            s = tl.zeros((N, M), tl.float32)
            for slot in tl.static_range(tl.constexpr(KSET[0])):
                s = tl.dot(tiles[slot], slices[slot], s)
            if len(own) > 0:
                s = s * own[0][:, None]
            if len(own) > 1:
                s = s + own[1][:, None] * whole[None, :]
            s = turns.mean_added(s, mean, turn, t, inside, KSET[3])
            s = tl.where((inside & (block * KSET[5] + t >= start))[:, None], s, float("-inf"))
            tiles, numbers = VREAD(values, lookups, block, row, head, t, inside, VSET, COMPILED)
            top, total, low, sums = softmax.add(top, total, low, sums, s, tiles, numbers)
    return top, total, low, sums
