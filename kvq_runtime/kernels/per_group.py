"""Read a tile of tokens that are rounded in several groups of a head's channels: KIVI's and SQuat's values.

One slot, decoded: what steps and lows multiply is an element, not a score. Further settings: BITS, 1 if low is stored,
GROUP, a power of two. Every byte is read once.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.slabs import field


@triton.jit
def codes_of(at, there, GROUP: tl.constexpr, BITS: tl.constexpr):
    """All codes of the groups whose bytes begin at `at` [A, B], int32 [A, B, GROUP]."""
    A: tl.constexpr = at.shape[0]
    B: tl.constexpr = at.shape[1]
    code = tl.zeros((A, B, GROUP), tl.int32)
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            j, stream = tl.arange(0, GROUP * (8 >> log) // 8), tl.arange(0, 1 << log)
            # what the wider planes hold comes first
            byte = at[:, :, None] + GROUP * (BITS - BITS % (16 >> log)) // 8 + j[None, None, :]
            byte = tl.load(byte, mask=there[:, :, None], other=0).to(tl.int32)
            bits = (byte[:, :, None, :] >> (stream * (8 >> log))[None, None, :, None]) & ((1 << (8 >> log)) - 1)
            code |= tl.reshape(bits, (A, B, GROUP)) << (BITS - BITS % (16 >> log))
    return code


@triton.jit
def token(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Rounded codes, decoded."""
    BITS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[8]
    GROUP: tl.constexpr = SET[9]
    GROUPS: tl.constexpr = SET[3] // GROUP
    BYTES: tl.constexpr = GROUP * BITS // 8
    WIDE: tl.constexpr = SET[2] // GROUP
    g = tl.arange(0, WIDE)[None, :]
    at, there = ((t * SET[4] + head) * GROUPS)[:, None] + g, here[:, None] & (g < GROUPS)
    codes = field(table, block, row, 0, NAMES, SET[4] * SET[5] * GROUPS * BYTES, tl.uint8) + at * BYTES
    code = codes_of(codes, there, GROUP, BITS)
    NUMBERS: tl.constexpr = SET[4] * SET[5] * GROUPS * 2
    scale = tl.load(field(table, block, row, 1, NAMES, NUMBERS, tl.float16) + at, mask=there, other=0.0).to(tl.float32)
    if SET[8] == 1:
        low = tl.load(field(table, block, row, 2, NAMES, NUMBERS, tl.float16) + at, mask=there, other=0.0)
        low = low.to(tl.float32)
    else:
        low = scale * (-((1 << BITS) - 1) / 2)
    x = code.to(tl.float32) * scale[:, :, None] + low[:, :, None]
    return (tl.reshape(x, (here.shape[0], SET[2])).to(tl.float16),), ()
