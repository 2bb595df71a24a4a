"""Split-K decode attention to keys and values that are looked up, or angles, N tokens at a time.

A scan is a jit function of this file or rounded.py, which the kernel gets as a compile-time argument (SCAN): the
loop over the blocks of a split. Its arguments are those of the kernel (kernel.py), and

    i_first, i_last   the split's blocks: scalars, i_first up to but without i_last
    i_b, i_h          batch row and KV head
    start             the row's first slot that is neither padding nor a sink
    part              where it writes what it found: Part of queries.py

A reader is a jit function of this file or read_polar.py, likewise (READ_KEYS, READ_VALUES): it reads a tile of tokens
whose codes lie along the channels of each head.

    b_tiles, b_numbers = READ(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L, S)

    p_table     block table, int64, see block_table.py
    p_lookup    what codes are looked up in, in the reader's own form; or None
    o_t, m_t    tokens of the block [N], and which of them are there
    L, S        LayerSettings and the reader's own

`b_tiles` is a tuple of S.SLOTS tiles float16 [N, S.P], slot i the channels [i · COLUMNS, (i + 1) · COLUMNS).
`b_numbers` is (scale,) or (), float32 [N]:   x̂[t, c] = scale[t] · tile[t, c]

So neither a dot product with the query, slot by slot, nor a sum over tokens, weighted by probability times scale,
multiplies an element.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import queries, rope
from kvq_runtime.kernels.attend.block_table import CODES, SCALE, field_of
from kvq_runtime.kernels.attend.settings import COMPILED


@triton.jit
def post_rope(
    q, q_exact, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, i_first, i_last, i_b, i_h, start,
    part, L: tl.constexpr, READ_KEYS: tl.constexpr, KS: tl.constexpr, READ_VALUES: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Keys after RoPE, or without it; `p_rope` is not None if their mean was removed."""
    N: tl.constexpr = L.N
    M: tl.constexpr = L.M
    o_c = tl.arange(0, KS.P)
    b_q = ()
    for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
        o_d = slot * KS.COLUMNS + o_c
        m_d = (o_c < KS.COLUMNS) & (o_d < L.D)
        b_slot = queries.load_query(q, scale, i_b * L.H + i_h, o_d, m_d, L)
        b_q = b_q + (b_slot.to(tl.float16),)
    i_first = tl.maximum(i_first, start // L.T)
    b_top, b_total, b_sums = queries.empty(N, L, VS)
    for i_block in range(i_first, i_last):
        b_mean = rope.mean_of_block(q_exact, scale, p_rope, i_b, i_h, i_block, L)
        for i_tile in tl.range((L.T + N - 1) // N, disable_licm=True):
            o_t = i_tile * N + tl.arange(0, N)
            m_t = o_t < L.T
            b_tiles, b_numbers = READ_KEYS(p_keys, p_key_lookup, i_block, i_b, i_h, o_t, m_t, L, KS)
            b_s = tl.zeros((N, M), tl.float32)
            for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
                b_s = tl.dot(b_tiles[slot], b_q[slot], b_s)
            if len(b_numbers) > 0:
                b_s = b_s * b_numbers[0][:, None]
            b_s = queries.capped(rope.add_mean(b_s, b_mean, p_rope, i_tile, i_block, L), L)
            b_s = tl.where((m_t & (i_block * L.T + o_t >= start))[:, None], b_s, float("-inf"))
            b_tiles, b_numbers = READ_VALUES(p_values, p_value_lookup, i_block, i_b, i_h, o_t, m_t, L, VS)
            b_top, b_total, b_sums = queries.add(b_top, b_total, b_sums, b_s, b_tiles, b_numbers)
    queries.store((b_top, b_total, b_sums), part, L, VS)


# ---- the reader of indices into a codebook ---------------------------------------------------------------------------


@triton.jit
def _load_runs(
    p_codes, o_t, m_t, i_h, BYTES: tl.constexpr, RUNS: tl.constexpr, L: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """The BYTES of one head's tokens in RUNS equal runs: a tuple of uint8 [N, P]."""
    COLUMNS: tl.constexpr = BYTES // RUNS
    o_c = tl.arange(0, S.P)[None, :]
    p = p_codes + (o_t * (L.H * BYTES) + i_h * BYTES)[:, None] + o_c
    b_runs = ()
    for run in tl.static_range(RUNS):
        b_runs = b_runs + (tl.load(p + run * COLUMNS, mask=m_t[:, None] & (o_c < COLUMNS), other=0),)
    return b_runs


@triton.jit
def load_number(p_number, o_t, m_t, i_h, L: tl.constexpr):
    """A float16 per token and head: float32 [N]."""
    return tl.load(p_number + o_t * L.H + i_h, mask=m_t, other=0.0).to(tl.float32)


@triton.jit
def codebook(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L: tl.constexpr, S: tl.constexpr):
    """Indices into a codebook, S of CodebookSettings: SLOTS tiles [N, P], and the scale [N].

    A row of `p_lookup` is what an index stands for: ELEMENTS float16, in words of up to 64 bits, so that one gather
    serves up to four elements.
    """
    BYTES: tl.constexpr = S.COLUMNS * S.STREAMS * S.BITS // 8
    p_codes = field_of(p_table, i_block, i_b, CODES, 2, L.H * L.T * BYTES, tl.uint8, L)
    b_runs = _load_runs(p_codes, o_t, m_t, i_h, BYTES, BYTES // S.COLUMNS, L, S)
    WORDS: tl.constexpr = (S.ELEMENTS + 3) // 4
    EACH: tl.constexpr = S.ELEMENTS // WORDS
    b_tiles = ()
    for word in tl.static_range(WORDS):
        b_words = ()
        for stream in tl.static_range(tl.constexpr(S.STREAMS)):
            b_index = _indices(b_runs, stream, S.BITS)
            b_words = b_words + (tl.load(p_lookup + b_index * WORDS + word),)
        for element in tl.static_range(EACH):
            for stream in tl.static_range(tl.constexpr(S.STREAMS)):
                b_bits = (b_words[stream] >> (16 * element)).to(tl.int16)
                b_tiles = b_tiles + (b_bits.to(tl.float16, bitcast=True),)
    p_scale = field_of(p_table, i_block, i_b, SCALE, 2, L.H * L.T * 2, tl.float16, L)
    return b_tiles, (load_number(p_scale, o_t, m_t, i_h, L),)


@triton.jit
def _codes(b_runs, STREAM: tl.constexpr, BITS: tl.constexpr):
    """The codes of one stream, by arithmetic: int32 [N, P]."""
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
def _indices(b_runs, STREAM: tl.constexpr, BITS: tl.constexpr):
    """The indices that one stream looks up, unpacked four bytes at a time: int32 [N, P].

    A plane of w bits is planar (ops/pack.py): byte j holds the codes of streams 0, 1, ... at bits 0, w, 2w, ... Codes
    of several planes have as many streams as their narrowest plane; the bytes of the wider ones come in runs of that
    stream's length. `b_runs` are these, a tuple of uint8 [N, P], those of wider planes first.
    """
    if COMPILED and BITS != 8:
        b_index = tl.inline_asm_elementwise(
            _assembly(STREAM, BITS),
            "=r" + ",r" * len(b_runs),
            b_runs,
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        ).to(tl.int32)
    else:
        b_index = _codes(b_runs, STREAM, BITS)
    return b_index


@triton.constexpr_function
def _assembly(stream, bits):
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
