"""Polar readers: a tile of tokens of angles and radii, by the tree of products from the radii down to the elements.

Both are readers, see read.py, with S of PolarSettings. `polar_pairs` is the one of heads of 16 to 128 channels, a power
of two: at every level the words of values are pairs (i, i + half of the level's values), so that cos and sin of the
codes (i, i + half) are two words of the level below, and nothing is moved between threads, or inside a word. `polar` is
that of any head, whose levels are interleaved.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.angles import multiply_level
from kvq_runtime.kernels.attend.block_table import CODES, field_of
from kvq_runtime.kernels.attend.read import load_number
from kvq_runtime.kernels.attend.settings import COMPILED
from kvq_runtime.kernels.attend.words import build_tile, load_columns, load_words, log2, select_bytes

RADII, NORM = tl.constexpr(1), tl.constexpr(2)  # fields beside CODES; a norm where radii are 8 bits
AFTER = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 $0, $1, zero, zero; }")


@triton.jit
def polar_pairs(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L: tl.constexpr, S: tl.constexpr):
    """SLOTS tiles [N, P], and the scale [N] or no number: column 2 i + l of a head is coordinate i + l · D / 2.

    `p_lookup` is layout.py's `_words`. A thread has two tokens.
    """
    LEVELS: tl.constexpr = len(S.LEVELS)
    FIELDS: tl.constexpr = 2 + S.LOG8
    COUNT: tl.constexpr = L.D >> LEVELS  # radii of a head
    TOKENS: tl.constexpr = L.H * L.T
    o_row = o_t * L.H + i_h
    p_codes = field_of(p_table, i_block, i_b, CODES, FIELDS, TOKENS * S.BYTES, tl.uint8, L)
    b_words = load_words(p_codes, o_row, m_t, S.BYTES)
    b_numbers = ()
    if S.LOG8 == 1 or COUNT == 1:
        p_number = field_of(p_table, i_block, i_b, FIELDS - 1, FIELDS, TOKENS * 2, tl.float16, L)
        b_numbers = (tl.load(p_number + o_row, mask=m_t, other=0.0).to(tl.float32),)
    if COUNT == 1 and S.LOG8 == 0:
        b_values = (tl.full(o_t.shape, 0x3C003C00, tl.uint32),)
    else:
        UNIT: tl.constexpr = tl.uint8 if S.LOG8 == 1 else tl.uint16
        p_radii = field_of(p_table, i_block, i_b, RADII, FIELDS, TOKENS * COUNT * (2 - S.LOG8), UNIT, L)
        b_values = _load_radii(p_radii, o_row, m_t, COUNT, S.LOG8 == 1)
    if COUNT % 2 == 1:
        b_values = _crossed(_level(b_words, b_values, p_lookup, 0, 0, LEVELS - 1, S))
    DONE: tl.constexpr = COUNT % 2 + log2(max(1, S.SLOTS // len(b_values)))  # levels that slots share
    for up in tl.static_range(COUNT % 2, DONE):
        b_values = _level(b_words, b_values, p_lookup, 0, L.D >> (LEVELS + 1 - up), LEVELS - 1 - up, S)
    tl.debug_barrier()  # before the products, not between them and the stores of a tile
    b_tiles = ()
    EACH: tl.constexpr = len(b_values) // S.SLOTS
    for slot in tl.static_range(tl.constexpr(S.SLOTS)):
        b_slot = ()
        for i in tl.static_range(EACH):
            b_slot = b_slot + (b_values[slot * EACH + i],)
        for up in tl.static_range(DONE, LEVELS):
            b_slot = _level(
                b_words, b_slot, p_lookup, slot * (EACH << (up - DONE)), L.D >> (LEVELS + 1 - up), LEVELS - 1 - up, S
            )  # fmt: skip
        b_tiles = b_tiles + (build_tile(b_slot, S.P // 2),)
        b_words = _after(b_words, b_slot[len(b_slot) - 1])
    return b_tiles, b_numbers


@triton.jit
def _level(
    b_words, b_values, p_lookup, START: tl.constexpr, HALF: tl.constexpr, LEVEL: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """`multiply_level` of level LEVEL, a tuple of words [N]."""
    V: tl.constexpr = S.LEVELS[LEVEL]
    return multiply_level(b_words, b_values, p_lookup, START, HALF, V)


@triton.jit
def _after(b_words, b_value):
    """The same words [N], but not before the value is known: or the compiler begins all slots at once, and spills."""
    b_later = b_words
    if COMPILED:
        b_zero = tl.inline_asm_elementwise(AFTER, "=r,r", [b_value], dtype=tl.uint32, is_pure=True, pack=1)
        b_later = ()
        for i in tl.static_range(len(b_words)):
            b_later = b_later + (b_words[i] | b_zero,)
    return b_later


@triton.jit
def _load_radii(p_radii, o_row, m_row, COUNT: tl.constexpr, LOG8: tl.constexpr):
    """Radii as root mean squares, or, LOG8, that by the norm's: words [N] of two float16.

    Those of an even COUNT are the pairs (i, i + COUNT / 2), those of an odd one i twice.
    """
    b_x = load_columns(p_radii, o_row, m_row, COUNT, COUNT, triton.next_power_of_2(COUNT))
    b_pairs = ()
    FAR: tl.constexpr = COUNT // 2 if COUNT % 2 == 0 else 0
    for i in tl.static_range(COUNT - FAR):
        b_pairs = b_pairs + (_radius(b_x[i], COUNT, LOG8) | (_radius(b_x[i + FAR], COUNT, LOG8) << 16),)
    return b_pairs


@triton.jit
def _radius(b_x, COUNT: tl.constexpr, LOG8: tl.constexpr):
    """The bits [N] of the float16 that is stored, or that a code of 8 bits stands for: stages/polar.py's RADII."""
    if LOG8:
        b_ratio = tl.exp2(b_x.to(tl.float32) * (-1 / 16)) * COUNT**0.5
        b_x = b_ratio.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return b_x


@triton.jit
def _crossed(b_values):
    """Pairs (i, i + half) from words [N] that hold one value twice."""
    HALF: tl.constexpr = len(b_values) // 2
    b_pairs = ()
    for i in tl.static_range(HALF):
        b_pairs = b_pairs + (select_bytes(b_values[i], b_values[i + HALF], 0x5410),)
    return b_pairs


@triton.jit
def polar(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L: tl.constexpr, S: tl.constexpr):
    """One tile [N, P], and no numbers. `p_lookup` is the points [levels, 64, 2], then what 8-bit radii stand for."""
    LEVELS: tl.constexpr = len(S.LEVELS)
    FIELDS: tl.constexpr = 2 + S.LOG8
    COUNT: tl.constexpr = L.D >> LEVELS  # radii of a head
    TOKENS: tl.constexpr = L.H * L.T
    o_row = (o_t * L.H + i_h)[:, None]
    o_r = tl.arange(0, S.P >> LEVELS)[None, :]
    m_r = m_t[:, None] & (o_r < COUNT)
    if S.LOG8 == 1:
        p_radii = field_of(p_table, i_block, i_b, RADII, FIELDS, TOKENS * COUNT, tl.uint8, L)
        p_norm = field_of(p_table, i_block, i_b, NORM, FIELDS, TOKENS * 2, tl.float16, L)
        b_norm = load_number(p_norm, o_t, m_t, i_h, L)
        b_code = tl.load(p_radii + o_row * COUNT + o_r, mask=m_r, other=0).to(tl.int32)
        b_x = tl.load(p_lookup + LEVELS * 128 + b_code)
        b_x = b_x * b_norm[:, None]
    else:
        p_radii = field_of(p_table, i_block, i_b, RADII, FIELDS, TOKENS * COUNT * 2, tl.float16, L)
        b_x = tl.load(p_radii + o_row * COUNT + o_r, mask=m_r, other=0.0).to(tl.float32) * 2 ** (LEVELS / 2)
    p_codes = field_of(p_table, i_block, i_b, CODES, FIELDS, TOKENS * S.BYTES, tl.uint8, L) + o_row * S.BYTES
    for up in tl.static_range(LEVELS):
        b_code = _load_angles(
            p_codes, m_t, S.P >> (LEVELS - up), L.D >> (LEVELS - up), LEVELS - 1 - up, S
        )  # fmt: skip
        b_both = tl.load(
            (p_lookup + (LEVELS - 1 - up) * 128).to(tl.pointer_type(tl.int64)) + b_code
        )  # (cos, sin), one gather
        b_cos, b_sin = (
            b_both.to(tl.int32).to(tl.float32, bitcast=True),
            (b_both >> 32).to(tl.int32).to(tl.float32, bitcast=True),
        )
        b_x = tl.interleave(b_x * b_cos, b_x * b_sin)
    return (b_x.to(tl.float16),), ()


@triton.jit
def _load_angles(p_codes, m_t, P: tl.constexpr, COUNT: tl.constexpr, LEVEL: tl.constexpr, S: tl.constexpr):
    """The COUNT codes of one level: int32 [N, P]."""
    V: tl.constexpr = S.LEVELS[LEVEL]
    o_c = tl.arange(0, P)[None, :]
    b_code = tl.zeros((m_t.shape[0], P), tl.int32)
    p_plane = p_codes + V.RUN
    for log in tl.static_range(4):
        if V.BITS & (8 >> log) != 0:
            length = (V.COUNT * (8 >> log) + 7) // 8
            o_code = V.FIRST + o_c
            b_byte = tl.load(p_plane + o_code % length, mask=m_t[:, None] & (o_c < COUNT), other=0).to(tl.int32)
            b_bits = (b_byte >> (o_code // length * (8 >> log))) & ((1 << (8 >> log)) - 1)
            b_code |= b_bits << (V.BITS - V.BITS % (16 >> log))
            p_plane += length
    return b_code
