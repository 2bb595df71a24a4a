"""Read a tile of tokens of angles and radii, by the tree of products from the radii down to the elements.

`polar_pairs` is a reader, see per_token.py, with S of PolarSettings, of heads of 16 to 128 channels, a power of two: at
every level the words of values are pairs (i, i + half of the level's values), so that cos and sin of the codes
(i, i + half) are two words of the level below, and nothing is moved between threads, or inside a word. Other heads are
decoded by torch: a reader of them, whose levels were interleaved, and the kernel that decodes blocks agreed in
Triton's interpreter and disagreed on an H100.

Of a level of pairs, values are words of two float16, those of codes (i, i + HALF). A code of up to two bits selects its
cos from the eight bytes of four float16; one of three selects low and high bytes from eight each. Those of further bits
have as many eights as it takes. A code's bits lie in planes, see ops/pack.py; V are the LevelSettings of the level.

`b_words` are a head's codes, a tuple of words [N] (words.py), of which every function here knows at compile time where
in them a code is. All words are uint32 [N].
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.block_table import CODES, field_of
from kvq_runtime.kernels.attend.settings import COMPILED
from kvq_runtime.kernels.attend.words import (
    build_tile,
    load_columns,
    load_words,
    log2,
    lookup_bytes,
    multiply_half2,
    select_bytes,
)

RADII = tl.constexpr(1)  # a field beside CODES; a norm is beside it where radii are 8 bits
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
    """`_multiply_level` of level LEVEL, a tuple of words [N]."""
    V: tl.constexpr = S.LEVELS[LEVEL]
    return _multiply_level(b_words, b_values, p_lookup, START, HALF, V)


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


# ---- one level of pairs: multiply radii by cos and sin of their codes ------------------------------------------------


@triton.jit
def _multiply_level(b_words, b_values, p_lookup, START: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr):
    """The values of the level below, two words for each: times cos, times sin of its codes, from code START on."""
    b_below = ()
    if V.BITS <= 2:
        b_cos, b_sin = tl.load(p_lookup + V.WORD), tl.load(p_lookup + V.WORD + 1)
        for i in tl.static_range(len(b_values)):
            b_which = _select_short(b_words, START + i, HALF, V)
            b_below = b_below + (multiply_half2(b_values[i], lookup_bytes(b_cos, b_which)),)
            b_below = b_below + (multiply_half2(b_values[i], lookup_bytes(b_sin, b_which)),)
    else:
        for i in tl.static_range(0, len(b_values), 2):
            b_cos, b_sin = _lookup_long(
                b_words, p_lookup, START + i, START + min(i + 1, len(b_values) - 1), HALF, V
            )  # fmt: skip
            for k in tl.static_range(min(2, len(b_values) - i)):
                b_below = b_below + (multiply_half2(b_values[i + k], b_cos[k]),)
                b_below = b_below + (multiply_half2(b_values[i + k], b_sin[k]),)
    return b_below


@triton.jit
def _select_short(b_words, CODE: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr):
    """Return the places of the codes CODE and CODE + HALF, of up to two bits, among the bytes of four float16.

    A word with a nibble for each place.
    """
    FAR: tl.constexpr = CODE + HALF
    b_near = _load_bits(b_words, CODE, V.BITS, 0, V) * 0x22 + 0x10101010
    b_far = _load_bits(b_words, FAR, V.BITS, 0, V) * 0x22 + 0x10101010
    PLACES: tl.constexpr = _byte(CODE, V.BITS, V) % 4 + (4 + _byte(FAR, V.BITS, V) % 4) * 16
    return select_bytes(b_near, b_far, PLACES)


@triton.jit
def _lookup_long(b_words, p_lookup, CODE: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr):
    """(cos, sin) of codes of three bits or more: each two words, the pairs (CODE, CODE + HALF), (NEXT, NEXT + HALF)."""
    b_which, b_flags = _split_codes(b_words, CODE, NEXT, HALF, V)
    GROUPS: tl.constexpr = 1 << (V.BITS - 3 - V.MIRRORED)
    b_found = ()
    for part in tl.static_range(4):  # low and high bytes of cos, of sin
        b_eights = ()
        for group in tl.static_range(GROUPS):
            b_eights = b_eights + (lookup_bytes(tl.load(p_lookup + V.WORD + group * 4 + part), b_which),)
        for bit in tl.static_range(log2(GROUPS)):
            b_mask = select_bytes(b_flags[bit], b_flags[bit], 0xBA98)
            b_chosen = ()
            for group in tl.static_range(GROUPS >> (bit + 1)):
                b_chosen = b_chosen + ((b_eights[2 * group] & ~b_mask) | (b_eights[2 * group + 1] & b_mask),)
            b_eights = b_chosen
        b_bytes = b_eights[0]
        if V.MIRRORED == 1 and part % 2 == 1:
            b_bytes = b_bytes ^ (b_flags[V.BITS - 4] & 0x80808080)
        b_found = b_found + (b_bytes,)
    b_cos = (select_bytes(b_found[0], b_found[1], 0x5140), select_bytes(b_found[0], b_found[1], 0x7362))
    b_sin = (select_bytes(b_found[2], b_found[3], 0x5140), select_bytes(b_found[2], b_found[3], 0x7362))
    return b_cos, b_sin


@triton.jit
def _split_codes(b_words, CODE: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr):
    """Codes CODE, CODE + HALF, NEXT, NEXT + HALF: a word of their low three bits as nibbles, and a tuple of words.

    The tuple has one for each further bit, lowest first, which is the highest bit of a byte for every code.
    """
    b_flags = ()
    if V.BITS >= 4:
        A: tl.constexpr = _byte(CODE, 4, V)
        B: tl.constexpr = _byte(NEXT, 4, V)
        LOW_HALF: tl.constexpr = _shift(CODE, 4, V) == 0 and _shift(NEXT, 4, V) == 0
        NEAR: tl.constexpr = LOW_HALF and A % 2 == 0 and B == A + 1
        FAR: tl.constexpr = _byte(CODE + HALF, 4, V) == A and _byte(NEXT + HALF, 4, V) == B
        if HALF > 0 and NEAR and FAR:  # a byte is a pair, and two are what is wanted
            b_four = b_words[A // 4]
            b_which = (b_four >> (A % 4 * 8)) & 0x7777
            b_flags = b_flags + (select_bytes(b_four << 4, b_four, 0x5140 + 0x2222 * (A % 4 // 2)),)
        else:
            b_low = _gather_bits(b_words, CODE, NEXT, HALF, 4, 0, V)
            b_which = _nibbles(b_low & 0x07070707)
            b_flags = b_flags + (b_low << 4,)
        if V.BITS > 4:
            b_high = _gather_bits(b_words, CODE, NEXT, HALF, V.BITS - 4, 0, V)
            for bit in tl.static_range(tl.constexpr(V.BITS - 4)):
                b_flags = b_flags + (b_high << (7 - bit),)
    else:
        b_low = _gather_bits(b_words, CODE, NEXT, HALF, 2, 0, V)
        b_high = _gather_bits(b_words, CODE, NEXT, HALF, 1, 2, V)
        b_which = _nibbles(b_low | b_high)
    return b_which, b_flags


@triton.jit
def _nibbles(b_x):
    """Four bytes below 16 as nibbles, the low two bytes of a word."""
    b_x = b_x | (b_x >> 4)
    return select_bytes(b_x, b_x, 0x20)


@triton.jit
def _gather_bits(
    b_words, CODE: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr, PLANE: tl.constexpr, UP: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """A plane's bits of codes CODE, CODE + HALF, NEXT, NEXT + HALF, a byte each of a word, from bit UP of it on."""
    A: tl.constexpr = _byte(CODE, PLANE, V)
    B: tl.constexpr = _byte(CODE + HALF, PLANE, V)
    C: tl.constexpr = _byte(NEXT, PLANE, V)
    D: tl.constexpr = _byte(NEXT + HALF, PLANE, V)
    b_x = select_bytes(
        _load_bits(b_words, CODE, PLANE, UP, V), _load_bits(b_words, CODE + HALF, PLANE, UP, V),
        A % 4 + (4 + B % 4) * 16 + C % 4 * 256 + (4 + D % 4) * 4096,
    )  # fmt: skip
    SAME: tl.constexpr = (
        A // 4 == C // 4 and B // 4 == D // 4
        and _shift(CODE, PLANE, V) == _shift(NEXT, PLANE, V)
        and _shift(CODE + HALF, PLANE, V) == _shift(NEXT + HALF, PLANE, V)
    )  # fmt: skip
    if not SAME:
        b_next = select_bytes(
            _load_bits(b_words, NEXT, PLANE, UP, V), _load_bits(b_words, NEXT + HALF, PLANE, UP, V),
            C % 4 + (4 + D % 4) * 16,
        )  # fmt: skip
        b_x = select_bytes(b_x, b_next, 0x5410)
    return b_x


@triton.jit
def _load_bits(b_words, CODE: tl.constexpr, PLANE: tl.constexpr, UP: tl.constexpr, V: tl.constexpr):
    """A plane's bits of code CODE and of those in the three bytes beside it, a word, from bit UP of each byte on."""
    SHIFT: tl.constexpr = _shift(CODE, PLANE, V) - UP
    b_word = b_words[_byte(CODE, PLANE, V) // 4]
    if SHIFT > 0:
        b_word = b_word >> SHIFT
    elif SHIFT < 0:
        b_word = b_word << -SHIFT
    return b_word & ((((1 << PLANE) - 1) << UP) * 0x01010101)


@triton.constexpr_function
def _byte(i, plane, level):
    """The byte of a head in which a plane of code i of a level is; see ops/pack.py."""
    bits, at, count, first = level[:4]
    for wider in (8, 4, 2, 1):
        length = (count * wider + 7) // 8
        if wider == plane:
            return at + (first + i) % length
        at += length if bits & wider else 0
    return None


@triton.constexpr_function
def _shift(i, plane, level):
    """The bit of that byte at which the plane's bits begin."""
    _, _, count, first = level[:4]
    return (first + i) // ((count * plane + 7) // 8) * plane
