"""Turn packed codes into float16, two elements an operation, without a conversion: 0x6400 | c is the half 1024 + c.

A plane of w bits is planar (ops/pack.py): byte j holds the codes of streams 0, 1, ... at bits 0, w, 2w, ... A stream's
bits are left where they are in the byte, so the half is c · 2^(s·w); whatever it is multiplied with takes 2^-(s·w).

Codes of several planes have as many streams as their narrowest plane; the bytes of the wider ones come in runs of that
stream's length. `parts` are these runs, wider planes first.
"""

import triton
import triton.language as tl


@triton.jit
def integer(parts, STREAM: tl.constexpr, BITS: tl.constexpr):
    """The codes of one stream, int32."""
    STREAMS: tl.constexpr = 8 // (BITS & -BITS)
    code = parts[0].to(tl.int32) * 0
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            # a plane of w bits has STREAMS · w / 8 runs, after those of the wider planes
            byte = parts[STREAMS * (BITS - BITS % (16 >> log)) // 8 + STREAM % (STREAMS * (8 >> log) // 8)].to(tl.int32)
            bits = byte >> (STREAM // (STREAMS * (8 >> log) // 8) * (8 >> log))
            code |= (bits & ((1 << (8 >> log)) - 1)) << (BITS - BITS % (16 >> log))
    return code


@triton.jit
def half(parts, STREAM: tl.constexpr, BITS: tl.constexpr, COMPILED: tl.constexpr):
    """The codes of one stream times `weight`, float16."""
    if BITS == 3 and COMPILED:
        x = _threes(parts[STREAM % 2], parts[2], STREAM)
    elif BITS & (BITS - 1) != 0:
        bits = integer(parts, STREAM, BITS).to(tl.int16)
        x = (bits | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif COMPILED:
        x = _quads(parts[0], ((1 << BITS) - 1) << (STREAM * BITS))
    else:
        bits = parts[0].to(tl.int16) & (((1 << BITS) - 1) << (STREAM * BITS))
        x = (bits | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return x


@triton.jit
def weight(STREAM: tl.constexpr, BITS: tl.constexpr):
    """What `half` multiplies the codes of a stream with."""
    return 1.0 if BITS & (BITS - 1) != 0 else 1.0 * (1 << (STREAM * BITS))


_SPREAD = tl.constexpr("""
        mov.b32 bias, 0x64006400;
        prmt.b32 $0, four, 0x64646464, 0x4140;
        prmt.b32 $1, four, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, bias;
        sub.rn.f16x2 $1, $1, bias;
    }""")


@triton.constexpr_function
def _masked(mask):
    """Four bytes in a register: mask them, spread them under the exponent in two registers, subtract 1024."""
    return "{ .reg .b32 four, bias;" + f"and.b32 four, $2, {mask * 0x01010101:#x};" + _SPREAD


@triton.jit
def _quads(byte, MASK: tl.constexpr):
    return tl.inline_asm_elementwise(_masked(MASK), "=r,=r,r", [byte], dtype=tl.float16, is_pure=True, pack=4)


@triton.constexpr_function
def _joined(stream):
    """The same of a plane of 2 bits and one of 1, whose bit goes above the two."""
    up = f"shl.b32 four, $3, {2 - stream};" if stream < 2 else f"shr.b32 four, $3, {stream - 2};"
    pair = f"shr.b32 pair, $2, {stream // 2 * 2}; and.b32 pair, pair, 0x03030303;"
    join = "and.b32 four, four, 0x04040404; or.b32 four, four, pair;"
    return "{ .reg .b32 four, pair, bias;" + up + pair + join + _SPREAD


@triton.jit
def _threes(pairs, ones, STREAM: tl.constexpr):
    return tl.inline_asm_elementwise(
        _joined(STREAM), "=r,=r,r,r", [pairs, ones], dtype=tl.float16, is_pure=True, pack=4
    )
