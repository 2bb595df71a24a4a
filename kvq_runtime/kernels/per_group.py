"""Attend where several groups lie in a block of a channel, or in a head of a token: KIVI's and SQuat's groups of 32.

`channel` is the loop over keys per channel: a group of tokens is to it what a block is to per_channel.py. Further
settings there: BITS, 1 if low is stored, padded head size, GROUP. `token` reads a tile of tokens encoded per token, one
slot, decoded: what steps and lows multiply is then an element, not a score. Further settings: BITS, 1 if low is stored,
GROUP, a power of two. Every byte is read once by either.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels import softmax, unpack
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
    j = tl.arange(0, SET[2])[None, :]
    parts = ()
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
def channel(
    q, scale, turn, keys, values, lookup, lookups, first, last, row, head, start, H: tl.constexpr, G: tl.constexpr,
    TQ: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KREAD: tl.constexpr, KSET: tl.constexpr, VREAD: tl.constexpr,
    VSET: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `first` to `last` of keys after RoPE."""
    d = tl.arange(0, KSET[9])
    here = d < KSET[3]
    query = load_query(q, scale, row * H + head, d, here, TQ, G, M, KSET[3])
    GROUPS: tl.constexpr = KSET[5] // KSET[10]
    first = tl.maximum(first, start // KSET[5])
    top, total, low, sums = softmax.empty(M, KSET[2], VSET[2], VSET[0])
    for i in range(first * GROUPS, last * GROUPS):
        block, group = i // GROUPS, i % GROUPS
        parts, step, lows = _opened(keys, block, group, row, head, d, here, KSET)
        base = tl.sum(query * lows[:, None], 0)
        scaled = (query * step[:, None]).to(tl.float16)
        j = tl.arange(0, KSET[2])
        for stream in tl.static_range(tl.constexpr(KSET[0])):
            s = tl.dot(tl.trans(unpack.half(parts, stream, KSET[7], COMPILED)), scaled)
            s = s * (1 / weight(stream, KSET)) + base[None, :]
            t = group * KSET[10] + stream * KSET[1] + j
            seen = (j < KSET[1]) & (block * KSET[5] + t >= start)
            tiles, numbers = VREAD(values, lookups, block, row, head, t, seen, VSET, COMPILED)
            s = tl.where(seen[:, None], s, float("-inf"))
            top, total, low, sums = softmax.add(top, total, low, sums, s, tiles, numbers)
    return top, total, low, sums


@triton.jit
def token(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Rounded codes, decoded."""
    BITS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[8]
    GROUP: tl.constexpr = SET[9]
    GROUPS: tl.constexpr = SET[3] // GROUP
    BYTES: tl.constexpr = GROUP * BITS // 8
    WIDE: tl.constexpr = SET[2] // GROUP
    N: tl.constexpr = here.shape[0]
    g = tl.arange(0, WIDE)[None, :]
    at, there = ((t * SET[4] + head) * GROUPS)[:, None] + g, here[:, None] & (g < GROUPS)
    codes = field(table, block, row, 0, NAMES, SET[4] * SET[5] * GROUPS * BYTES, tl.uint8) + at * BYTES
    code = tl.zeros((N, WIDE, GROUP), tl.int32)
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            j, stream = tl.arange(0, GROUP * (8 >> log) // 8), tl.arange(0, 1 << log)
            # what the wider planes hold comes first
            byte = codes[:, :, None] + GROUP * (BITS - BITS % (16 >> log)) // 8 + j[None, None, :]
            byte = tl.load(byte, mask=there[:, :, None], other=0).to(tl.int32)
            bits = (byte[:, :, None, :] >> (stream * (8 >> log))[None, None, :, None]) & ((1 << (8 >> log)) - 1)
            code |= tl.reshape(bits, (N, WIDE, GROUP)) << (BITS - BITS % (16 >> log))
    NUMBERS: tl.constexpr = SET[4] * SET[5] * GROUPS * 2
    scale = tl.load(field(table, block, row, 1, NAMES, NUMBERS, tl.float16) + at, mask=there, other=0.0).to(tl.float32)
    if SET[8] == 1:
        low = tl.load(field(table, block, row, 2, NAMES, NUMBERS, tl.float16) + at, mask=there, other=0.0)
        low = low.to(tl.float32)
    else:
        low = scale * (-((1 << BITS) - 1) / 2)
    x = code.to(tl.float32) * scale[:, :, None] + low[:, :, None]
    return (tl.reshape(x, (N, SET[2])).to(tl.float16),), ()
