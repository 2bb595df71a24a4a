"""Bit unpacking: packed codes to float16, two elements an operation, no conversion: 0x6400 | c is the half 1024 + c.

A plane of w bits is planar (ops/pack.py): byte j holds the codes of streams 0, 1, ... at bits 0, w, 2w, ... A stream's
bits are left where they are in the byte, so the half is c · 2^(s·w); whatever it is multiplied with takes 2^-(s·w).

Codes of several planes have as many streams as their narrowest plane; the bytes of the wider ones come in runs of that
stream's length. `b_runs` are these, a tuple of uint8 [N, P], those of wider planes first.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.settings import COMPILED


@triton.jit
def codes_int32(b_runs, STREAM: tl.constexpr, BITS: tl.constexpr):
    """The codes of one stream: int32 [N, P]."""
    STREAMS: tl.constexpr = 8 // (BITS & -BITS)
    b_code = b_runs[0].to(tl.int32) * 0
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            # a plane of w bits has STREAMS · w / 8 runs, after those of the wider planes
            b_byte = b_runs[STREAMS * (BITS - BITS % (16 >> log)) // 8 + STREAM % (STREAMS * (8 >> log) // 8)].to(
                tl.int32
            )
            b_bits = b_byte >> (STREAM // (STREAMS * (8 >> log) // 8) * (8 >> log))
            b_code |= (b_bits & ((1 << (8 >> log)) - 1)) << (BITS - BITS % (16 >> log))
    return b_code


@triton.jit
def codes_float16(b_runs, STREAM: tl.constexpr, BITS: tl.constexpr):
    """The codes of one stream times `scale_of_stream`: float16 [N, P]."""
    if COMPILED:
        b_x = tl.inline_asm_elementwise(
            _halves(STREAM, BITS), "=r,=r" + ",r" * len(b_runs), b_runs, dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        if BITS & (BITS - 1) == 0:
            b_bits = b_runs[0].to(tl.int16) & (((1 << BITS) - 1) << (STREAM * BITS))
        else:
            b_bits = codes_int32(b_runs, STREAM, BITS).to(tl.int16)
        b_x = (b_bits | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return b_x


@triton.jit
def indices(b_runs, STREAM: tl.constexpr, STREAMS: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr):
    """What one stream looks up: int32 [N, P]; PAIRED, the codes of stream STREAMS + STREAM are above its own."""
    if COMPILED and BITS != 8:
        b_index = tl.inline_asm_elementwise(
            _indices(STREAM, STREAMS, BITS, PAIRED),
            "=r" + ",r" * len(b_runs),
            b_runs,
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        ).to(tl.int32)
    else:
        b_index = codes_int32(b_runs, STREAM, BITS)
        if PAIRED:
            b_index |= codes_int32(b_runs, STREAMS + STREAM, BITS) << BITS
    return b_index


@triton.jit
def scale_of_stream(STREAM: tl.constexpr, BITS: tl.constexpr):
    """What `codes_float16` multiplies the codes of a stream by: 2^(STREAM · BITS), or 1 where there are more planes."""
    return 1.0 if BITS & (BITS - 1) != 0 else 1.0 * (1 << (STREAM * BITS))


@triton.constexpr_function
def _halves(stream, bits):
    """Assembly for four bytes of a register: mask them, spread them under the exponent in two, subtract 1024."""
    place = stream * bits if bits & (bits - 1) == 0 else 0
    return f"""{{
        .reg .b32 four, field, bias;
        mov.b32 four, 0;
        {_collected(stream, bits, place, 2)}
        mov.b32 bias, 0x64006400;
        prmt.b32 $0, four, 0x64646464, 0x4140;
        prmt.b32 $1, four, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, bias;
        sub.rn.f16x2 $1, $1, bias;
    }}"""


@triton.constexpr_function
def _indices(stream, streams, bits, paired):
    """Assembly for the codes of four bytes at a time, a byte each."""
    above = _collected(streams + stream, bits, bits, 1) if paired else ""
    return f"""{{
        .reg .b32 four, field;
        mov.b32 four, 0;
        {_collected(stream, bits, 0, 1)} {above}
        mov.b32 $0, four;
    }}"""


@triton.constexpr_function
def _collected(stream, bits, place, first):
    """Assembly that adds a stream's codes to the bytes of `four`, at bit `place`; runs are operands `first` and on."""
    streams, lines = 8 // (bits & -bits), []
    for width in (8, 4, 2, 1):
        if bits & width:
            runs, up = streams * width // 8, bits - bits % (2 * width)
            run, move = streams * up // 8 + stream % runs, place + up - stream // runs * width
            shift = "shl" if move > 0 else "shr"
            mask = (((1 << width) - 1) << (place + up)) * 0x01010101
            lines += [
                f"{shift}.b32 field, ${first + run}, {abs(move)};",
                f"and.b32 field, field, {mask:#x};",
                "or.b32 four, four, field;",
            ]
    return " ".join(lines)
