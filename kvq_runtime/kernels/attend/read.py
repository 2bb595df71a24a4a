"""Read a tile of tokens whose codes lie along the channels of each head: keys or values, encoded per token.

A reader is a jit function of this file or read_polar.py, which the kernel gets as a compile-time argument
(READ_KEYS, READ_VALUES):

    b_tiles, b_numbers = READ(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L, S)

    p_table     block table, int64, see block_table.py
    p_lookup    what codes are looked up in, in the reader's own form; or None
    i_block, i_b, i_h   block, batch row and KV head, scalars
    o_t, m_t    tokens of the block [N], and which of them are there
    L, S        LayerSettings and the reader's own

`b_tiles` is a tuple of S.SLOTS tiles float16 [N, S.P], slot i the channels [i · COLUMNS, (i + 1) · COLUMNS).
`b_numbers` is (scale,) or (), float32 [N]:   x̂[t, c] = scale[t] · tile[t, c]

So neither a dot product with the query, slot by slot, nor a sum over tokens, weighted by probability times scale,
multiplies an element.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import unpack
from kvq_runtime.kernels.attend.block_table import CODES, SCALE, field_of


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
            b_index = unpack.indices(b_runs, stream, S.BITS)
            b_words = b_words + (tl.load(p_lookup + b_index * WORDS + word),)
        for element in tl.static_range(EACH):
            for stream in tl.static_range(tl.constexpr(S.STREAMS)):
                b_bits = (b_words[stream] >> (16 * element)).to(tl.int16)
                b_tiles = b_tiles + (b_bits.to(tl.float16, bitcast=True),)
    p_scale = field_of(p_table, i_block, i_b, SCALE, 2, L.H * L.T * 2, tl.float16, L)
    return b_tiles, (load_number(p_scale, o_t, m_t, i_h, L),)
