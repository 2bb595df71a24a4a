"""Attend to keys whose codes lie along the channels of each head, N tokens at a time; see read.py."""

import triton
import triton.language as tl

from kvq_runtime.kernels import softmax
from kvq_runtime.kernels.read import load_query, weight


@triton.jit
def plain(
    q, scale, turn, keys, values, lookup, lookups, first, last, row, head, start, H: tl.constexpr, G: tl.constexpr,
    TQ: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KREAD: tl.constexpr, KSET: tl.constexpr, VREAD: tl.constexpr,
    VSET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `first` to `last`."""
    d = tl.arange(0, KSET[2])
    whole = tl.zeros((M,), tl.float32)
    slices = ()
    for slot in tl.static_range(tl.constexpr(KSET[0])):
        channel = slot * KSET[1] + d
        here = (d < KSET[1]) & (channel < KSET[3])
        part = load_query(q, scale, row * H + head, channel, here, TQ, G, M, KSET[3])
        whole += tl.sum(part, 1)
        slices = slices + ((part * (1 / weight(slot, KSET))).to(tl.float16),)
    top, total, low, sums = softmax.empty(M, VSET[2], VSET[0])
    TILES: tl.constexpr = (KSET[5] + N - 1) // N  # of a block
    for i in range(first * TILES, last * TILES):
        block, t = i // TILES, i % TILES * N + tl.arange(0, N)
        seen = (t < KSET[5]) & (block * KSET[5] + t >= start)
        tiles, own = KREAD(keys, lookup, block, row, head, t, seen, KSET, COMPILED)
        s = tl.zeros((M, N), tl.float32)
        for slot in tl.static_range(tl.constexpr(KSET[0])):
            s = tl.dot(slices[slot], tl.trans(tiles[slot]), s)
        if len(own) > 0:
            s = s * own[0][None, :]
        if len(own) > 1:
            s = s + whole[:, None] * own[1][None, :]
        tiles, numbers = VREAD(values, lookups, block, row, head, t, seen, VSET, COMPILED)
        s = tl.where(seen[None, :], s, float("-inf"))
        top, total, low, sums = softmax.add(top, total, low, sums, s, tiles, numbers)
    return top, total, low, sums
