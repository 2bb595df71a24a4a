"""Read a tile of tokens of angles and radii: a token is a thread's, its codes words of four bytes, values pairs of float16.

The tree of products is walked from the radii down, and at every level the words of values are pairs (i, i + half of the
level's values): so cos and sin of codes (i, i + half) make two words of the level below. A code of up to three bits
picks its cos or sin from eight bytes in registers, two codes an instruction; those of 8 bytes of the table are a group.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.slabs import field


@triton.jit
def polar(table, lookup, block, row, head, t, here, SET: tl.constexpr, COMPILED: tl.constexpr):
    """Angles and radii, in one slot: column 2 i + l is coordinate i + l · D / 2. `lookup` is the layout's `_points`.

    Further settings: LEVELS; bytes of a head's codes; 1 if radii are 8 bit beside a norm; and of each level, the first
    lowest: its bits, the first byte of the run of levels packed with it, the codes of that run, the first of its own,
    its first word of the lookup, and 1 if the upper half of its codes is the lower one's, negative.
    """
    LEVELS: tl.constexpr = SET[7]
    NAMES: tl.constexpr = 2 + SET[9]
    RADII: tl.constexpr = SET[3] >> LEVELS
    TOKENS: tl.constexpr = SET[4] * SET[5]
    at = t * SET[4] + head
    words = _words(field(table, block, row, 0, NAMES, TOKENS * SET[8], tl.uint8), at, here, SET[8])
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
        values = _crossed(_level(words, values, 0, lookup, SET, LEVELS - 1, 0, COMPILED), COMPILED)
    DONE: tl.constexpr = RADII % 2 + _log(max(1, SET[0] // len(values)))  # levels that slots share
    for up in tl.static_range(RADII % 2, DONE):
        values = _level(words, values, 0, lookup, SET, LEVELS - 1 - up, SET[3] >> (LEVELS + 1 - up), COMPILED)
    tl.debug_barrier()
    tiles = ()
    EACH: tl.constexpr = len(values) // SET[0]
    for slot in tl.static_range(tl.constexpr(SET[0])):
        part = ()
        for i in tl.static_range(EACH):
            part = part + (values[slot * EACH + i],)
        for up in tl.static_range(DONE, LEVELS):
            part = _level(
                words, part, slot * (EACH << (up - DONE)), lookup, SET, LEVELS - 1 - up, SET[3] >> (LEVELS + 1 - up),
                COMPILED,
            )  # fmt: skip
        tiles = tiles + (_tile(part, SET[2] // 2),)
        words = _after(words, part[len(part) - 1], COMPILED)
    return tiles, scale


@triton.jit
def _after(words, value, COMPILED: tl.constexpr):
    """The same words, but not before the value is known: or the compiler begins all slots at once, and spills."""
    later = words
    if COMPILED:
        zero = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 $0, $1, zero, zero; }", "=r,r", [value], dtype=tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip
        later = ()
        for i in tl.static_range(len(words)):
            later = later + (words[i] | zero,)
    return later


@triton.jit
def _rows(pointer, at, here, STRIDE: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr):
    """COUNT elements of each token, a tuple of P [N]; a thread has two tokens, one beside the other."""
    j = tl.arange(0, P)[None, :]
    ats = tl.split(tl.reshape(at, (at.shape[0] // 2, 2)))
    heres = tl.split(tl.reshape(here, (at.shape[0] // 2, 2)))
    first = tl.load(pointer + (ats[0] * STRIDE)[:, None] + j, mask=heres[0][:, None] & (j < COUNT), other=0)
    second = tl.load(pointer + (ats[1] * STRIDE)[:, None] + j, mask=heres[1][:, None] & (j < COUNT), other=0)
    one, two = _columns(first.to(tl.uint32), P), _columns(second.to(tl.uint32), P)
    columns = ()
    for i in tl.static_range(P):
        columns = columns + (tl.reshape(tl.join(one[i], two[i]), at.shape),)
    return columns


@triton.jit
def _words(codes, at, here, BYTES: tl.constexpr):
    """A head's bytes as words, a tuple of uint32 [N]; loaded by as many at once as heads are aligned to."""
    words = ()
    if BYTES % 16 == 0:
        for i in tl.static_range(BYTES // 16):
            part = (codes + i * 16).to(tl.pointer_type(tl.uint32))
            words = words + _rows(part, at, here, BYTES // 4, 4, 4)
    else:
        EACH: tl.constexpr = 4 if BYTES % 4 == 0 else (2 if BYTES % 2 == 0 else 1)
        UNIT: tl.constexpr = tl.uint32 if EACH == 4 else (tl.uint16 if EACH == 2 else tl.uint8)
        COUNT: tl.constexpr = BYTES // EACH
        units = _rows(codes.to(tl.pointer_type(UNIT)), at, here, COUNT, COUNT, triton.next_power_of_2(BYTES) // EACH)
        for i in tl.static_range((BYTES + 3) // 4):
            word = units[i * (4 // EACH)]
            for k in tl.static_range(1, 4 // EACH):
                word = word | (units[i * (4 // EACH) + k] << (8 * EACH * k))
            words = words + (word,)
    return words


@triton.jit
def _columns(x, COUNT: tl.constexpr):
    """The columns of [N, COUNT], a power of two: a tuple of [N]."""
    parts = (x,)
    for step in tl.static_range(_log(COUNT)):
        halves = ()
        for part in tl.static_range(1 << step):
            one = tl.reshape(parts[part], (x.shape[0], 2, COUNT >> (step + 1)))
            halves = halves + tl.split(tl.permute(one, (0, 2, 1)))
        parts = halves
    columns = ()
    for i in tl.static_range(COUNT):
        columns = columns + (tl.reshape(parts[i], (x.shape[0],)),)
    return columns


@triton.constexpr_function
def _log(count):
    return count.bit_length() - 1


@triton.jit
def _radii(radii, at, here, COUNT: tl.constexpr, LOG8: tl.constexpr):
    """Radii as root mean squares, or, LOG8, that by the norm's: pairs (i, i + COUNT / 2), or, odd, each one twice."""
    x = _rows(radii, at, here, COUNT, COUNT, triton.next_power_of_2(COUNT))
    pairs = ()
    FAR: tl.constexpr = COUNT // 2 if COUNT % 2 == 0 else 0
    for i in tl.static_range(COUNT - FAR):
        pairs = pairs + (_radius(x[i], COUNT, LOG8) | (_radius(x[i + FAR], COUNT, LOG8) << 16),)
    return pairs


@triton.jit
def _radius(x, COUNT: tl.constexpr, LOG8: tl.constexpr):
    if LOG8:
        x = (tl.exp2(x.to(tl.float32) * (-1 / 16)) * COUNT**0.5).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return x


@triton.jit
def _crossed(values, COMPILED: tl.constexpr):
    """Pairs (i, i + half) from words that hold one value twice."""
    HALF: tl.constexpr = len(values) // 2
    pairs = ()
    for i in tl.static_range(HALF):
        pairs = pairs + (mixed(values[i], values[i + HALF], 0x5410, COMPILED),)
    return pairs


@triton.jit
def _level(
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
            cos, sin = _many(
                words, START + i, START + min(i + 1, len(values) - 1), HALF, lookup, SET, FIRST, COMPILED
            )
            for k in tl.static_range(min(2, len(values) - i)):
                below = below + (times(values[i + k], cos[k], COMPILED),)
                below = below + (times(values[i + k], sin[k], COMPILED),)
    return below


@triton.jit
def _pair(words, I: tl.constexpr, HALF: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr, COMPILED: tl.constexpr):
    """Which bytes of four float16 are those of codes I and I + HALF, of one or two bits: a nibble for each."""
    one = _bits(words, I, SET[FIRST], 0, SET, FIRST) * 0x22 + 0x10101010
    two = _bits(words, I + HALF, SET[FIRST], 0, SET, FIRST) * 0x22 + 0x10101010
    places: tl.constexpr = _byte(I, SET[FIRST], SET, FIRST) % 4 + (4 + _byte(I + HALF, SET[FIRST], SET, FIRST) % 4) * 16
    return mixed(one, two, places, COMPILED)


@triton.jit
def _many(
    words, I: tl.constexpr, J: tl.constexpr, HALF: tl.constexpr, lookup, SET: tl.constexpr, FIRST: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of codes of three bits or more, each the pairs (I, I + HALF) and (J, J + HALF)."""
    BITS: tl.constexpr = SET[FIRST]
    which, flags = _codes(words, I, J, HALF, SET, FIRST, COMPILED)
    GROUPS: tl.constexpr = 1 << (BITS - 3 - SET[FIRST + 5])
    found = ()
    for part in tl.static_range(4):  # low and high bytes of cos, of sin
        some = ()
        for group in tl.static_range(GROUPS):
            some = some + (picked(tl.load(lookup + SET[FIRST + 4] + group * 4 + part), which, COMPILED),)
        for bit in tl.static_range(_log(GROUPS)):
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
    words, I: tl.constexpr, J: tl.constexpr, HALF: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """The lowest three bits of codes I, I + HALF, J, J + HALF as nibbles; of the others each, highest in a byte a code."""
    BITS: tl.constexpr = SET[FIRST]
    flags = ()
    if BITS >= 4:
        A: tl.constexpr = _byte(I, 4, SET, FIRST)
        B: tl.constexpr = _byte(J, 4, SET, FIRST)
        near: tl.constexpr = _shift(I, 4, SET, FIRST) == 0 and _shift(J, 4, SET, FIRST) == 0 and A % 2 == 0 and B == A + 1
        far: tl.constexpr = HALF > 0 and _byte(I + HALF, 4, SET, FIRST) == A and _byte(J + HALF, 4, SET, FIRST) == B
        if near and far:  # a byte is a pair, and two are what is wanted
            four = words[A // 4]
            which = (four >> (A % 4 * 8)) & 0x7777
            flags = flags + (mixed(four << 4, four, 0x5140 + 0x2222 * (A % 4 // 2), COMPILED),)
        else:
            low = _bytes(words, I, J, HALF, 4, 0, SET, FIRST, COMPILED)
            which = _nibbles(low & 0x07070707, COMPILED)
            flags = flags + (low << 4,)
        if BITS > 4:
            high = _bytes(words, I, J, HALF, BITS - 4, 0, SET, FIRST, COMPILED)
            for bit in tl.static_range(BITS - 4):
                flags = flags + (high << (7 - bit),)
    else:
        low = _bytes(words, I, J, HALF, 2, 0, SET, FIRST, COMPILED)
        high = _bytes(words, I, J, HALF, 1, 2, SET, FIRST, COMPILED)
        which = _nibbles(low | high, COMPILED)
    return which, flags


@triton.jit
def _nibbles(x, COMPILED: tl.constexpr):
    """Four bytes below 16 as nibbles."""
    x = x | (x >> 4)
    return mixed(x, x, 0x20, COMPILED)


@triton.jit
def _bytes(
    words, I: tl.constexpr, J: tl.constexpr, HALF: tl.constexpr, PLANE: tl.constexpr, UP: tl.constexpr,
    SET: tl.constexpr, FIRST: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A plane's bits of codes I, I + HALF, J, J + HALF, a byte each."""
    a: tl.constexpr = _byte(I, PLANE, SET, FIRST)
    b: tl.constexpr = _byte(I + HALF, PLANE, SET, FIRST)
    c: tl.constexpr = _byte(J, PLANE, SET, FIRST)
    d: tl.constexpr = _byte(J + HALF, PLANE, SET, FIRST)
    one = mixed(
        _bits(words, I, PLANE, UP, SET, FIRST), _bits(words, I + HALF, PLANE, UP, SET, FIRST),
        a % 4 + (4 + b % 4) * 16 + c % 4 * 256 + (4 + d % 4) * 4096, COMPILED,
    )  # fmt: skip
    same: tl.constexpr = (
        a // 4 == c // 4 and b // 4 == d // 4
        and _shift(I, PLANE, SET, FIRST) == _shift(J, PLANE, SET, FIRST)
        and _shift(I + HALF, PLANE, SET, FIRST) == _shift(J + HALF, PLANE, SET, FIRST)
    )  # fmt: skip
    if not same:
        two = mixed(
            _bits(words, J, PLANE, UP, SET, FIRST), _bits(words, J + HALF, PLANE, UP, SET, FIRST),
            c % 4 + (4 + d % 4) * 16, COMPILED,
        )  # fmt: skip
        one = mixed(one, two, 0x5410, COMPILED)
    return one


@triton.jit
def _bits(words, I: tl.constexpr, PLANE: tl.constexpr, UP: tl.constexpr, SET: tl.constexpr, FIRST: tl.constexpr):
    """A plane's bits of code I and of those in the three bytes beside it, at bit UP of each byte."""
    SHIFT: tl.constexpr = _shift(I, PLANE, SET, FIRST) - UP
    word = words[_byte(I, PLANE, SET, FIRST) // 4]
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


@triton.jit
def _tile(words, COUNT: tl.constexpr):
    """Words of two float16 as a tile [N, 2 · COUNT], zero beyond them."""
    parts = words + (tl.zeros_like(words[0]),) * (COUNT - len(words))
    for step in tl.static_range(_log(COUNT)):
        less = ()
        for i in tl.static_range(COUNT >> (step + 1)):
            both = tl.join(parts[i], parts[i + (COUNT >> (step + 1))])
            less = less + (tl.reshape(both, (words[0].shape[0], 2 << step)),)
        parts = less
    low = parts[0].to(tl.uint16).to(tl.float16, bitcast=True)
    high = (parts[0] >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (words[0].shape[0], 2 * COUNT))


@triton.jit
def picked(table, which, COMPILED: tl.constexpr):
    """Four of the eight bytes of an int64, as the nibbles of `which` say."""
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; mov.b64 {low, high}, $1; prmt.b32 $0, low, high, $2; }", "=r,l,r", [table, which],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = tl.zeros_like(which)
        for i in tl.static_range(4):
            byte = table >> (((which >> (4 * i)) & 7) * 8).to(tl.int64)
            x |= (byte & 255).to(tl.uint32) << (8 * i)
    return x


@triton.jit
def mixed(one, two, BYTES: tl.constexpr, COMPILED: tl.constexpr):
    """Four of the eight bytes of two words, by a nibble each; with its highest bit, the byte's highest bit eight times."""
    if COMPILED:
        x = tl.inline_asm_elementwise(
            _mixing(BYTES), "=r,r,r", [one, two], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        x = tl.zeros_like(one)
        for i in tl.static_range(4):
            which: tl.constexpr = (BYTES >> (4 * i)) & 15
            byte = ((one if which & 4 == 0 else two) >> (which % 4 * 8)) & 255
            if which & 8 != 0:
                byte = (byte >> 7) * 255
            x |= byte << (8 * i)
    return x


@triton.constexpr_function
def _mixing(nibbles):
    return f"prmt.b32 $0, $1, $2, {nibbles:#x};"


@triton.jit
def times(one, two, COMPILED: tl.constexpr):
    """Products of two words of two float16."""
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [one, two], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        x = tl.zeros_like(one)
        for i in tl.static_range(2):
            a = (one >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)
            b = (two >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)
            x |= (a * b).to(tl.uint16, bitcast=True).to(tl.uint32) << (16 * i)
    return x
