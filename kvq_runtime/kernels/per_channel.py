"""Attend to keys whose codes lie along the tokens of a block, a group of them at a time: KIVI's and SQuat's.

A group of a block is opened once: its bytes are read, per-channel steps scale the query, lows enter as q·low, and an
element costs its unpacking alone. Each stream of codes is a run of consecutive tokens. Settings are those of read.py,
with SLOTS streams of COLUMNS tokens; further ones: BITS, 1 if low is stored, padded head size, GROUP: tokens of a
group, which divides the block. Where streams are short, and would be padded to a tile, COLUMNS is GROUP: all streams of
a group are unpacked into one tile, at more instructions per code but none for tokens that are not there.

`turning`, for keys before RoPE, decodes a tile and turns it by a constant [K, T] table as if every block began at
position 0; the query is turned back by the block's position, see turn.py.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels import softmax, unpack
from kvq_runtime.kernels import turn as turns
from kvq_runtime.kernels.per_group import codes_of
from kvq_runtime.kernels.read import load_query, weight
from kvq_runtime.kernels.slabs import field


@triton.jit
def _opened(table, block, group, row, head, d, here, SET: tl.constexpr):
    """One group's bytes of channels d: (runs of uint8 [len(d), P], step, low), the last two float32."""
    BITS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[8]
    GROUPS: tl.constexpr = SET[5] // SET[10]
    BYTES: tl.constexpr = SET[10] * BITS // 8
    NUMBERS: tl.constexpr = SET[4] * SET[3] * GROUPS * 2
    codes = field(table, block, row, 0, NAMES, SET[4] * SET[3] * GROUPS * BYTES, tl.uint8)
    place = (head * SET[3] + d) * GROUPS + group
    parts = ()
    if SET[1] == SET[10]:
        code = codes_of((codes + place * BYTES)[:, None], here[:, None], SET[10], BITS)
        parts = (tl.reshape(code, (d.shape[0], SET[10])).to(tl.float16),)
    else:
        j = tl.arange(0, SET[2])[None, :]
        for run in tl.static_range(BYTES // SET[1]):
            at = codes + place[:, None] * BYTES + run * SET[1] + j
            parts = parts + (tl.load(at, mask=here[:, None] & (j < SET[1]), other=0),)
    step = tl.load(field(table, block, row, 1, NAMES, NUMBERS, tl.float16) + place, mask=here, other=0.0)
    step = step.to(tl.float32)
    if SET[8] == 1:
        low = tl.load(field(table, block, row, 2, NAMES, NUMBERS, tl.float16) + place, mask=here, other=0.0)
        low = low.to(tl.float32)
    else:
        low = step * (-((1 << BITS) - 1) / 2)
    return parts, step, low


@triton.jit
def plain(
    q, q_exact, scale, turn, keys, values, lookup, lookups, first, last, row, head, start, H: tl.constexpr,
    G: tl.constexpr, TQ: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KREAD: tl.constexpr, KSET: tl.constexpr,
    VREAD: tl.constexpr, VSET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `first` to `last` of keys after RoPE."""
    d = tl.arange(0, KSET[9])
    here = d < KSET[3]
    query = load_query(q, scale, row * H + head, d, here, TQ, G, M, KSET[3])
    first = tl.maximum(first, start // KSET[5])
    top, total, low, sums = softmax.empty(M, KSET[2], VSET[2], VSET[0])
    for block in tl.range(first, last, disable_licm=True):
        mean = turns.mean_opened(q_exact, scale, turn, row, head, block, H, G, TQ, M, KSET[3])
        for group in range(KSET[5] // KSET[10]):
            parts, step, lows = _opened(keys, block, group, row, head, d, here, KSET)
            if M > 8 or turn is not None:  # in registers it would leave too few
                query = load_query(q, scale, row * H + head, d, here, TQ, G, M, KSET[3])
            base = tl.sum(query * lows[:, None], 0)
            scaled = (query * step[:, None]).to(tl.float16)
            j = tl.arange(0, KSET[2])
            for stream in tl.static_range(tl.constexpr(KSET[0])):
                s = tl.dot(tl.trans(_codes(parts, stream, KSET, COMPILED)), scaled)
                s = s * (1 / weight(stream, KSET)) + base[None, :]
                t = group * KSET[10] + stream * KSET[1] + j
                s = turns.mean_added(s, mean, turn, t, j < KSET[1], KSET[3])
                seen = (j < KSET[1]) & (block * KSET[5] + t >= start)
                tiles, numbers = VREAD(values, lookups, block, row, head, t, seen, VSET, COMPILED)
                s = tl.where(seen[:, None], s, float("-inf"))
                top, total, low, sums = softmax.add(top, total, low, sums, s, tiles, numbers)
    return top, total, low, sums


@triton.jit
def turning(
    q, q_exact, scale, turn, keys, values, lookup, lookups, first, last, row, head, start, H: tl.constexpr,
    G: tl.constexpr, TQ: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KREAD: tl.constexpr, KSET: tl.constexpr,
    VREAD: tl.constexpr, VSET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The same of keys before RoPE, `turn` as in turn.py; a mean joins the lows."""
    HALF: tl.constexpr = KSET[3] // 2
    d = tl.arange(0, KSET[9] // 2)
    here = d < HALF
    rows, first = row * H + head, tl.maximum(first, start // KSET[5])
    one = load_query(q, scale, rows, d, here, TQ, G, M, KSET[3])
    two = load_query(q, scale, rows, HALF + d, here, TQ, G, M, KSET[3])
    one, two = turns.begun(one, two, d, turn, row, first, HALF)
    top, total, low, sums = softmax.empty(M, KSET[2], VSET[2], VSET[0])
    j = tl.arange(0, KSET[2])
    for block in tl.range(first, last, disable_licm=True):
        for group in range(KSET[5] // KSET[10]):
            parts, step, lows = _opened(keys, block, group, row, head, d, here, KSET)
            others, step2, lows2 = _opened(keys, block, group, row, head, HALF + d, here, KSET)
            if turn[4] is not None:
                lows += tl.load(turn[4] + head * KSET[3] + d, mask=here, other=0.0)
                lows2 += tl.load(turn[4] + head * KSET[3] + HALF + d, mask=here, other=0.0)
            left, right = one.to(tl.float16), two.to(tl.float16)
            for stream in tl.static_range(tl.constexpr(KSET[0])):
                t = group * KSET[10] + stream * KSET[1] + j
                seen = (j < KSET[1]) & (block * KSET[5] + t >= start)
                at = turn[0] + d[:, None] * (2 * KSET[5]) + t[None, :]
                c = tl.load(at, mask=here[:, None] & (j < KSET[1])[None, :], other=0.0)
                n = tl.load(at + KSET[5], mask=here[:, None] & (j < KSET[1])[None, :], other=0.0)
                a = _decoded(parts, step, lows, stream, KSET, COMPILED)
                b = _decoded(others, step2, lows2, stream, KSET, COMPILED)
                s = tl.dot(tl.trans(a * n + b * c), right, tl.dot(tl.trans(a * c - b * n), left))
                tiles, numbers = VREAD(values, lookups, block, row, head, t, seen, VSET, COMPILED)
                s = tl.where(seen[:, None], s, float("-inf"))
                top, total, low, sums = softmax.add(top, total, low, sums, s, tiles, numbers)
        one, two = turns.next_block(one, two, d, turn, HALF)
    return top, total, low, sums


@triton.jit
def _codes(parts, STREAM: tl.constexpr, SET: tl.constexpr, COMPILED: tl.constexpr):
    """The codes of one stream times its weight, float16."""
    return parts[0] if SET[1] == SET[10] else unpack.half(parts, STREAM, SET[7], COMPILED)


@triton.jit
def _decoded(parts, step, low, STREAM: tl.constexpr, SET: tl.constexpr, COMPILED: tl.constexpr):
    step = (step * (1 / weight(STREAM, SET))).to(tl.float16)[:, None]
    return _codes(parts, STREAM, SET, COMPILED) * step + low.to(tl.float16)[:, None]
