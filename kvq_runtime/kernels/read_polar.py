"""Read a tile of tokens of angles and radii: the tree of products, from the radii down to a head's elements.

At every level the words of values are pairs (i, i + half of the level's values), so that cos and sin of the codes
(i, i + half) are two words of the level below: nothing is moved between threads, or inside a word.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.angles import level
from kvq_runtime.kernels.slabs import field
from kvq_runtime.kernels.words import loaded, log, mixed, rows, tile

AFTER = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 $0, $1, zero, zero; }")


@triton.jit
def polar_pairs(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Angles and radii: column 2 i + l of a head is coordinate i + l · D / 2. `lookup` is layout.py's `_words`.

    Further settings: LEVELS; bytes of a head's codes; 1 if radii are 8 bit beside a norm; and of each level, the first
    lowest: its bits, the first byte of the run of levels packed with it, the codes of that run, the first of its own,
    its first word of the lookup, and 1 if the upper half of its codes is the lower one's, negative.
    """
    LEVELS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[9]
    RADII: tl.constexpr = SET[3] >> LEVELS
    TOKENS: tl.constexpr = SET[4] * SET[5]
    at = t * SET[4] + head
    words = loaded(field(table, block, row, 0, NAMES, TOKENS * SET[8], tl.uint8), at, here, SET[8])
    scale = ()
    if SET[9] == 1 or RADII == 1:
        numbers = field(table, block, row, NAMES - 1, NAMES, TOKENS * 2, tl.float16)
        scale = (tl.load(numbers + at, mask=here, other=0.0).to(tl.float32),)
    if RADII == 1 and SET[9] == 0:
        values = (tl.full(t.shape, 0x3C003C00, tl.uint32),)
    else:
        UNIT: tl.constexpr = tl.uint8 if SET[9] == 1 else tl.uint16
        radii = field(table, block, row, 1, NAMES, TOKENS * RADII * (2 - SET[9]), UNIT)
        values = _radii(radii, at, here, RADII, SET[9] == 1)
    if RADII % 2 == 1:
        values = _crossed(level(words, values, 0, lookup, SET, LEVELS - 1, 0, COMPILED), COMPILED)
    DONE: tl.constexpr = RADII % 2 + log(max(1, SET[0] // len(values)))  # levels that slots share
    for up in tl.static_range(RADII % 2, DONE):
        values = level(words, values, 0, lookup, SET, LEVELS - 1 - up, SET[3] >> (LEVELS + 1 - up), COMPILED)
    tl.debug_barrier()  # before the products, not between them and the stores of a tile
    tiles = ()
    EACH: tl.constexpr = len(values) // SET[0]
    for slot in tl.static_range(tl.constexpr(SET[0])):
        part = ()
        for i in tl.static_range(EACH):
            part = part + (values[slot * EACH + i],)
        for up in tl.static_range(DONE, LEVELS):
            part = level(
                words, part, slot * (EACH << (up - DONE)), lookup, SET, LEVELS - 1 - up, SET[3] >> (LEVELS + 1 - up),
                COMPILED,
            )  # fmt: skip
        tiles = tiles + (tile(part, SET[2] // 2),)
        words = _after(words, part[len(part) - 1], COMPILED)
    return tiles, scale


@triton.jit
def _after(words, value, COMPILED: tl.constexpr):
    """The same words, but not before the value is known: or the compiler begins all slots at once, and spills."""
    later = words
    if COMPILED:
        zero = tl.inline_asm_elementwise(AFTER, "=r,r", [value], dtype=tl.uint32, is_pure=True, pack=1)
        later = ()
        for i in tl.static_range(len(words)):
            later = later + (words[i] | zero,)
    return later


@triton.jit
def _radii(radii, at, here, COUNT: tl.constexpr, LOG8: tl.constexpr):
    """Radii as root mean squares, or, LOG8, that by the norm's: pairs (i, i + COUNT / 2), or, odd, each one twice."""
    x = rows(radii, at, here, COUNT, COUNT, triton.next_power_of_2(COUNT))
    pairs = ()
    FAR: tl.constexpr = COUNT // 2 if COUNT % 2 == 0 else 0
    for i in tl.static_range(COUNT - FAR):
        pairs = pairs + (_radius(x[i], COUNT, LOG8) | (_radius(x[i + FAR], COUNT, LOG8) << 16),)
    return pairs


@triton.jit
def _radius(x, COUNT: tl.constexpr, LOG8: tl.constexpr):
    """The float16 that is stored, or that a code of 8 bits stands for: one of stages/polar.py's RADII."""
    if LOG8:
        ratio = tl.exp2(x.to(tl.float32) * (-1 / 16)) * COUNT**0.5
        x = ratio.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return x


@triton.jit
def _crossed(values, COMPILED: tl.constexpr):
    """Pairs (i, i + half) from words that hold one value twice."""
    HALF: tl.constexpr = len(values) // 2
    pairs = ()
    for i in tl.static_range(HALF):
        pairs = pairs + (mixed(values[i], values[i + HALF], 0x5410, COMPILED),)
    return pairs
