"""Multiply values by the cos and sin of their codes, of one level of angles; see read_polar.py.

Values are words of two float16, those of codes (i, i + HALF). A code of up to two bits picks its cos from the eight
bytes of four float16; one of three picks low and high bytes from eight each. Those of further bits have as many eights
as it takes. A code's bits lie in planes, see ops/pack.py; FIRST is where the level's settings begin.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.words import log, mixed, picked, times


@triton.jit
def level(
    words, values, START: tl.constexpr, lookup, SET: tl.constexpr, LEVEL: tl.constexpr, HALF: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """The values of the level below, two words for each: times cos, times sin of its codes, from START on."""
    FIRST: tl.constexpr = 10 + 6 * LEVEL
    below = ()
    if SET[FIRST] <= 2:
        cos, sin = tl.load(lookup + SET[FIRST + 4]), tl.load(lookup + SET[FIRST + 4] + 1)
        for i in tl.static_range(len(values)):
            which = _pair(words, START + i, HALF, SET, FIRST, COMPILED)
            below = below + (times(values[i], picked(cos, which, COMPILED), COMPILED),)
            below = below + (times(values[i], picked(sin, which, COMPILED), COMPILED),)
    else:
        for i in tl.static_range(0, len(values), 2):
            cos, sin = _many(words, START + i, START + min(i + 1, len(values) - 1), HALF, lookup, SET, FIRST, COMPILED)
            for k in tl.static_range(min(2, len(values) - i)):
                below = below + (times(values[i + k], cos[k], COMPILED),)
                below = below + (times(values[i + k], sin[k], COMPILED),)
    return below


@triton.jit
def _pair(words, A: tl.constexpr, HALF: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr, COMPILED: tl.constexpr):
    """Which bytes of four float16 are those of codes A and A + HALF, of one or two bits: a nibble for each."""
    BITS: tl.constexpr = SET[FIRST]
    B: tl.constexpr = A + HALF
    one = _bits(words, A, BITS, 0, SET, FIRST) * 0x22 + 0x10101010
    two = _bits(words, B, BITS, 0, SET, FIRST) * 0x22 + 0x10101010
    places: tl.constexpr = _byte(A, BITS, SET, FIRST) % 4 + (4 + _byte(B, BITS, SET, FIRST) % 4) * 16
    return mixed(one, two, places, COMPILED)


@triton.jit
def _many(
    words, CODE: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr, lookup, SET: tl.constexpr, FIRST: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of codes of three bits or more, each the pairs (CODE, CODE + HALF) and (NEXT, NEXT + HALF)."""
    BITS: tl.constexpr = SET[FIRST]
    which, flags = _codes(words, CODE, NEXT, HALF, SET, FIRST, COMPILED)
    GROUPS: tl.constexpr = 1 << (BITS - 3 - SET[FIRST + 5])
    found = ()
    for part in tl.static_range(4):  # low and high bytes of cos, of sin
        some = ()
        for group in tl.static_range(GROUPS):
            some = some + (picked(tl.load(lookup + SET[FIRST + 4] + group * 4 + part), which, COMPILED),)
        for bit in tl.static_range(log(GROUPS)):
            mask = mixed(flags[bit], flags[bit], 0xBA98, COMPILED)
            less = ()
            for group in tl.static_range(GROUPS >> (bit + 1)):
                less = less + ((some[2 * group] & ~mask) | (some[2 * group + 1] & mask),)
            some = less
        one = some[0]
        if SET[FIRST + 5] == 1 and part % 2 == 1:
            one = one ^ (flags[BITS - 4] & 0x80808080)
        found = found + (one,)
    cos = (mixed(found[0], found[1], 0x5140, COMPILED), mixed(found[0], found[1], 0x7362, COMPILED))
    sin = (mixed(found[2], found[3], 0x5140, COMPILED), mixed(found[2], found[3], 0x7362, COMPILED))
    return cos, sin


@triton.jit
def _codes(
    words, CODE: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Codes CODE, CODE + HALF, NEXT, NEXT + HALF: their low three bits as nibbles, and each other bit atop of bytes."""
    BITS: tl.constexpr = SET[FIRST]
    flags = ()
    if BITS >= 4:
        A: tl.constexpr = _byte(CODE, 4, SET, FIRST)
        B: tl.constexpr = _byte(NEXT, 4, SET, FIRST)
        low_half: tl.constexpr = _shift(CODE, 4, SET, FIRST) == 0 and _shift(NEXT, 4, SET, FIRST) == 0
        near: tl.constexpr = low_half and A % 2 == 0 and B == A + 1
        far: tl.constexpr = _byte(CODE + HALF, 4, SET, FIRST) == A and _byte(NEXT + HALF, 4, SET, FIRST) == B
        if HALF > 0 and near and far:  # a byte is a pair, and two are what is wanted
            four = words[A // 4]
            which = (four >> (A % 4 * 8)) & 0x7777
            flags = flags + (mixed(four << 4, four, 0x5140 + 0x2222 * (A % 4 // 2), COMPILED),)
        else:
            low = _bytes(words, CODE, NEXT, HALF, 4, 0, SET, FIRST, COMPILED)
            which = _nibbles(low & 0x07070707, COMPILED)
            flags = flags + (low << 4,)
        if BITS > 4:
            high = _bytes(words, CODE, NEXT, HALF, BITS - 4, 0, SET, FIRST, COMPILED)
            for bit in tl.static_range(BITS - 4):
                flags = flags + (high << (7 - bit),)
    else:
        low = _bytes(words, CODE, NEXT, HALF, 2, 0, SET, FIRST, COMPILED)
        high = _bytes(words, CODE, NEXT, HALF, 1, 2, SET, FIRST, COMPILED)
        which = _nibbles(low | high, COMPILED)
    return which, flags


@triton.jit
def _nibbles(x, COMPILED: tl.constexpr):
    """Four bytes below 16 as nibbles."""
    x = x | (x >> 4)
    return mixed(x, x, 0x20, COMPILED)


@triton.jit
def _bytes(
    words, CODE: tl.constexpr, NEXT: tl.constexpr, HALF: tl.constexpr, PLANE: tl.constexpr, UP: tl.constexpr,
    SET: tl.constexpr, FIRST: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A plane's bits of codes CODE, CODE + HALF, NEXT, NEXT + HALF, a byte each."""
    a: tl.constexpr = _byte(CODE, PLANE, SET, FIRST)
    b: tl.constexpr = _byte(CODE + HALF, PLANE, SET, FIRST)
    c: tl.constexpr = _byte(NEXT, PLANE, SET, FIRST)
    d: tl.constexpr = _byte(NEXT + HALF, PLANE, SET, FIRST)
    one = mixed(
        _bits(words, CODE, PLANE, UP, SET, FIRST), _bits(words, CODE + HALF, PLANE, UP, SET, FIRST),
        a % 4 + (4 + b % 4) * 16 + c % 4 * 256 + (4 + d % 4) * 4096, COMPILED,
    )  # fmt: skip
    same: tl.constexpr = (
        a // 4 == c // 4 and b // 4 == d // 4
        and _shift(CODE, PLANE, SET, FIRST) == _shift(NEXT, PLANE, SET, FIRST)
        and _shift(CODE + HALF, PLANE, SET, FIRST) == _shift(NEXT + HALF, PLANE, SET, FIRST)
    )  # fmt: skip
    if not same:
        two = mixed(
            _bits(words, NEXT, PLANE, UP, SET, FIRST), _bits(words, NEXT + HALF, PLANE, UP, SET, FIRST),
            c % 4 + (4 + d % 4) * 16, COMPILED,
        )  # fmt: skip
        one = mixed(one, two, 0x5410, COMPILED)
    return one


@triton.jit
def _bits(words, CODE: tl.constexpr, PLANE: tl.constexpr, UP: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr):
    """A plane's bits of code CODE and of those in the three bytes beside it, at bit UP of each byte."""
    SHIFT: tl.constexpr = _shift(CODE, PLANE, SET, FIRST) - UP
    word = words[_byte(CODE, PLANE, SET, FIRST) // 4]
    if SHIFT > 0:
        word = word >> SHIFT
    elif SHIFT < 0:
        word = word << -SHIFT
    return word & ((((1 << PLANE) - 1) << UP) * 0x01010101)


@triton.constexpr_function
def _byte(i, plane, settings, first):
    """The byte of a head in which a plane of code i of a level is; see ops/pack.py."""
    bits, at, count, own = settings[first : first + 4]
    for wider in (8, 4, 2, 1):
        length = (count * wider + 7) // 8
        if wider == plane:
            return at + (own + i) % length
        at += length if bits & wider else 0
    return None


@triton.constexpr_function
def _shift(i, plane, settings, first):
    """The bit of that byte."""
    count, own = settings[first + 2 : first + 4]
    return (own + i) // ((count * plane + 7) // 8) * plane
