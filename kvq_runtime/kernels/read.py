"""Read a tile of tokens whose codes lie along the channels of each head: keys or values, encoded per token.

What is read is a tuple of SLOTS tiles [N, P], slot i the channels [i · COLUMNS, (i + 1) · COLUMNS), and (scale, low),
(scale,) or (), numbers per token:   x̂[t, c] = scale[t] · tile[t, c] + low[t]

So neither a dot product with the query, slice by slice, nor a sum over tokens, weighted by probability times scale,
multiplies an element. Settings of every layout begin with

    SLOTS, COLUMNS, P   slices of a head, channels of each, and that padded to a power of two, at least 16
    D, H, T             head size, KV heads, tokens of a block
    WEIGHT              bits of a plane whose streams carry the weight of unpack.py; 0: none
"""

import triton
import triton.language as tl

from kvq_runtime.kernels import unpack
from kvq_runtime.kernels.slabs import field


@triton.jit
def weight(SLOT: tl.constexpr, SET: tl.constexpr):
    """What the tile of a slot is too large by."""
    return 1.0 if SET[6] == 0 else unpack.weight(SLOT, SET[6])


@triton.jit
def load_query(q, scale, heads, d, here, TQ: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """All queries of a KV head, float32 [d, M], times `scale`; column r is query head r // TQ and token r % TQ."""
    r = tl.arange(0, M)
    at = q + (heads * G * TQ + r)[None, :] * D + d[:, None]
    return tl.load(at, mask=(r < G * TQ)[None, :] & here[:, None], other=0.0).to(tl.float32) * scale


@triton.jit
def _runs(codes, t, here, head, SET: tl.constexpr, BYTES: tl.constexpr, RUNS: tl.constexpr):
    """The bytes of one head's tokens in RUNS equal runs: a tuple of uint8 [N, P]."""
    COLUMNS: tl.constexpr = BYTES // RUNS
    j = tl.arange(0, SET[2])[None, :]
    at = codes + (t * (SET[4] * BYTES) + head * BYTES)[:, None] + j
    parts = ()
    for run in tl.static_range(RUNS):
        parts = parts + (tl.load(at + run * COLUMNS, mask=here[:, None] & (j < COLUMNS), other=0),)
    return parts


@triton.jit
def _number(pointer, t, here, head, SET: tl.constexpr):
    """A float16 per token and head."""
    return tl.load(pointer + t * SET[4] + head, mask=here, other=0.0).to(tl.float32)


@triton.jit
def uniform(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Rounded codes. Further settings: BITS, and 1 if low is stored (0: symmetric)."""
    BITS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[8]
    BYTES: tl.constexpr = SET[3] * BITS // 8
    NUMBERS: tl.constexpr = SET[4] * SET[5] * 2
    codes = field(table, block, row, 0, NAMES, SET[4] * SET[5] * BYTES, tl.uint8)
    parts = _runs(codes, t, here, head, SET, BYTES, BYTES // SET[1])
    tiles = ()
    for slot in tl.static_range(tl.constexpr(SET[0])):
        tiles = tiles + (unpack.half(parts, slot, BITS, COMPILED),)
    scale = _number(field(table, block, row, 1, NAMES, NUMBERS, tl.float16), t, here, head, SET)
    if SET[8] == 1:
        low = _number(field(table, block, row, 2, NAMES, NUMBERS, tl.float16), t, here, head, SET)
    else:
        low = scale * (-((1 << BITS) - 1) / 2)
    return tiles, (scale, low)


@triton.jit
def codebook(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Indices that stand for ELEMENTS elements each. Further settings: BITS, STREAMS, ELEMENTS, 1 if codes are PAIRED.

    An index of 8 bits is a byte, whether it is one code or several; paired, it is the codes of streams s and
    STREAMS + s, of BITS each. The table's rows are words of up to 64 bits, so that one gather serves up to four
    elements; element e of index stream s is slot e · STREAMS + s.
    """
    BITS: tl.constexpr = SET[7]
    STREAMS: tl.constexpr = SET[8]
    ELEMENTS: tl.constexpr = SET[9]
    BYTES: tl.constexpr = SET[1] * STREAMS * (1 + SET[10]) * BITS // 8
    codes = field(table, block, row, 0, 2, SET[4] * SET[5] * BYTES, tl.uint8)
    parts = _runs(codes, t, here, head, SET, BYTES, BYTES // SET[1])
    WORDS: tl.constexpr = (ELEMENTS + 3) // 4
    EACH: tl.constexpr = ELEMENTS // WORDS
    tiles = ()
    for word in tl.static_range(WORDS):
        words = ()
        for stream in tl.static_range(STREAMS):
            index = unpack.index(parts, stream, STREAMS, BITS, SET[10], COMPILED)
            words = words + (tl.load(lookup + index * WORDS + word),)
        for element in tl.static_range(EACH):
            for stream in tl.static_range(STREAMS):
                bits = (words[stream] >> (16 * element)).to(tl.int16)
                tiles = tiles + (bits.to(tl.float16, bitcast=True),)
    scale = _number(field(table, block, row, 1, 2, SET[4] * SET[5] * 2, tl.float16), t, here, head, SET)
    return tiles, (scale,)


@triton.jit
def polar(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Angles and radii, in one slot. `lookup` is the points [levels, 64, 2], then what 8-bit radii stand for.

    Further settings: LEVELS; bytes of a head's codes; 1 if radii are 8 bit beside a norm; and of each level, the first
    lowest: its bits, the first byte of the run of levels packed with it, the codes of that run, the first of its own.
    """
    LEVELS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[9]
    RADII: tl.constexpr = SET[3] >> LEVELS
    TOKENS: tl.constexpr = SET[4] * SET[5]
    at = (t * SET[4] + head)[:, None]
    j = tl.arange(0, SET[2] >> LEVELS)[None, :]
    there = here[:, None] & (j < RADII)
    if SET[9] == 1:
        radii = field(table, block, row, 1, NAMES, TOKENS * RADII, tl.uint8)
        norm = _number(field(table, block, row, 2, NAMES, TOKENS * 2, tl.float16), t, here, head, SET)
        x = tl.load(lookup + LEVELS * 128 + tl.load(radii + at * RADII + j, mask=there, other=0).to(tl.int32))
        x = x * norm[:, None]
    else:
        radii = field(table, block, row, 1, NAMES, TOKENS * RADII * 2, tl.float16)
        x = tl.load(radii + at * RADII + j, mask=there, other=0.0).to(tl.float32) * 2 ** (LEVELS / 2)
    codes = field(table, block, row, 0, NAMES, TOKENS * SET[8], tl.uint8) + at * SET[8]
    for up in tl.static_range(LEVELS):
        code = _angles(codes, here, SET[2] >> (LEVELS - up), SET[3] >> (LEVELS - up), SET, 10 + 4 * (LEVELS - 1 - up))
        both = tl.load(
            (lookup + (LEVELS - 1 - up) * 128).to(tl.pointer_type(tl.int64)) + code
        )  # (cos, sin), one gather
        cos, sin = (
            both.to(tl.int32).to(tl.float32, bitcast=True),
            (both >> 32).to(tl.int32).to(tl.float32, bitcast=True),
        )
        x = tl.interleave(x * cos, x * sin)
    return (x.to(tl.float16),), ()


@triton.jit
def _angles(codes, here, P: tl.constexpr, COUNT: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr):
    """The codes of one level, int32 [N, P]."""
    j = tl.arange(0, P)[None, :]
    code = tl.zeros((here.shape[0], P), tl.int32)
    first = codes + SET[FIRST + 1]
    for log in tl.static_range(4):
        if SET[FIRST] & (8 >> log) != 0:
            length = (SET[FIRST + 2] * (8 >> log) + 7) // 8
            k = SET[FIRST + 3] + j
            byte = tl.load(first + k % length, mask=here[:, None] & (j < COUNT), other=0).to(tl.int32)
            bits = (byte >> (k // length * (8 >> log))) & ((1 << (8 >> log)) - 1)
            code |= bits << (SET[FIRST] - SET[FIRST] % (16 >> log))
            first += length
    return code
