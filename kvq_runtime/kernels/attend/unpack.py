"""Unpack indices into a codebook, four bytes at a time.

A plane of w bits is planar (ops/pack.py): byte j holds the codes of streams 0, 1, ... at bits 0, w, 2w, ...

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
def indices(b_runs, STREAM: tl.constexpr, BITS: tl.constexpr):
    """Return the indices that one stream looks up: int32 [N, P]."""
    if COMPILED and BITS != 8:
        b_index = tl.inline_asm_elementwise(
            _indices(STREAM, BITS),
            "=r" + ",r" * len(b_runs),
            b_runs,
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        ).to(tl.int32)
    else:
        b_index = codes_int32(b_runs, STREAM, BITS)
    return b_index


@triton.constexpr_function
def _indices(stream, bits):
    """Assembly for the codes of four bytes at a time, a byte each."""
    streams, lines = 8 // (bits & -bits), []
    for width in (8, 4, 2, 1):
        if bits & width:
            runs, up = streams * width // 8, bits - bits % (2 * width)
            run, move = streams * up // 8 + stream % runs, up - stream // runs * width
            shift = "shl" if move > 0 else "shr"
            mask = (((1 << width) - 1) << up) * 0x01010101
            lines += [
                f"{shift}.b32 field, ${1 + run}, {abs(move)};",
                f"and.b32 field, field, {mask:#x};",
                "or.b32 four, four, field;",
            ]
    return f"""{{
        .reg .b32 four, field;
        mov.b32 four, 0;
        {" ".join(lines)}
        mov.b32 $0, four;
    }}"""
