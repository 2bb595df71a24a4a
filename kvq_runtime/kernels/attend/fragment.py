"""Read codes that lie as the tensor core's operand A (ops/fragment.py): what a lane loads is its share, nothing moves.

A code stays in its 16-bit container and becomes the mantissa of a float16 with the exponent of 1: x = 1 + code /
`weight`. One operation does that for two containers (LOP3). Products are of x; the ones are subtracted afterwards, in
float32, from a whole sum at once.

A tile in registers is [I, 256 = (8 g, 4 t, 2 r, 2 w, 2 h)]: of two dimensions every Triton gives a warp's lanes the
last one, 16 bytes each, so that tiles are loaded as they are multiplied.

Codes of a codebook of at most 16 float16 numbers are looked up instead, in registers, without a load: it is cut into a
table of low bytes and one of high bytes. PRMT, a byte permute, picks four bytes of eight by a nibble each: one picks
the low bytes of four elements, another their high bytes, and a third puts those of two together, which is what a
register of the operand holds. How codes of a width are stored (`STORED`) and looked up:

    1 bit     the sign of one number
    2 bits    the code; four low bytes and four high ones are one table
    3 bits    2 bits of the magnitude, whose plane is as that of 2 bits, then the sign
    4 bits    the sign, then 3 bits of the magnitude; or, of numbers without symmetry, the code: PRMT from the lower
              and from the upper eight, and the code's highest bit selects

Source: the instruction PRMT, PTX ISA 9.7.9. Sign and magnitude: codebooks of ops/lloyd.py are odd.

Letters beside those of arguments.py: I groups of 16 channels of a run · S tiles of tokens of a sub-block.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.arguments import COMPILED

PAIRED = tl.constexpr("0x3120")  # the two containers' bytes, those of the same codes side by side


@triton.constexpr_function
def _placed(width, slot):
    """(shift right, place of the lowest bit): brings a code at `slot` of a container between bits 4 and 9, or 2 and 9.

    As few different shifts as can be: they are shared by the slots.
    """
    at = width * slot
    if at >= 4 and at + width <= 10:
        return 0, at
    if at < 4:
        up = min(4, 10 - width - at)
        return -up, at + up
    down = 6 if width in (1, 2, 8) else at - 4
    return down, at - down


@triton.constexpr_function
def _lowest(planes, tile):
    """Return the place of a code's lowest bit in the mantissa, by its first plane."""
    width, up, _, slot = planes[0]
    return _placed(width, slot + tile)[1] - up


@triton.constexpr_function
def weight(planes, tile):
    """Return the power of two that `operand` divides the codes of a tile by."""
    return float(1 << (10 - _lowest(planes, tile)))


@triton.constexpr_function
def _assembly(planes, tile):
    """Two containers of each plane become two float16: 1 + code / weight."""
    return "{ .reg .b32 t, y; " + _one_plus(planes, tile) + " mov.b32 $0, y; }"


@triton.constexpr_function
def _centred_assembly(planes, tile, bits):
    """As `_assembly`, times the weight, less weight + (2^bits - 1) / 2: exact, in one operation more."""
    lowest = _lowest(planes, tile)
    factor = (25 - lowest) << 10
    less = 0x8000 | factor | ((1 << bits) - 1 << (lowest - 1))
    made = _one_plus(planes, tile) + f" mov.b32 t, {factor * 0x10001:#x}; mov.b32 c, {less * 0x10001:#x};"
    return "{ .reg .b32 t, y, c; " + made + " fma.rn.f16x2 $0, y, t, c; }"


@triton.constexpr_function
def _one_plus(planes, tile):
    """y: 1 + code / weight of two containers."""
    lowest, lines = _lowest(planes, tile), []
    for number in range(len(planes)):  # Triton 3.6 takes no names inside names
        width, up, _, slot = planes[number]
        down = (slot + tile) * width - lowest - up
        shift = "shr" if down > 0 else "shl"
        moved = f"{shift}.b32 t, ${number + 1}, {abs(down)};" if down else f"mov.b32 t, ${number + 1};"
        mask = ((1 << width) - 1 << (lowest + up)) * 0x00010001
        rest = "0x3C003C00" if number == 0 else "y"
        lines.append(f"{moved} lop3.b32 y, t, {mask:#x}, {rest}, 0xEA;")
    return " ".join(lines)


@triton.jit
def load_words(p_codes, S: tl.constexpr):
    """Return all words of a sub-block, S of RoundedSettings: a tuple of int16 [I, 256]."""
    b_words = ()
    for number in tl.static_range(len(S.WORDS)):
        b_words = b_words + (_load(p_codes, S, number),)
    return b_words


@triton.jit
def _load(p_codes, S: tl.constexpr, NUMBER: tl.constexpr):
    """Return the words of one entry of WORDS: int16 [I, 256]."""
    W: tl.constexpr = S.WORDS[NUMBER]
    START: tl.constexpr = W.START  # Triton 3.6 does not compute with a plain number
    STRIDE: tl.constexpr = W.STRIDE
    COUNT: tl.constexpr = W.COUNT
    LOADED: tl.constexpr = 16 * W.BITS  # of 16 bits: containers of 8 are loaded in pairs
    o_i, o_lane = tl.arange(0, COUNT)[:, None], tl.arange(0, LOADED)[None, :]
    p = (p_codes + START).to(tl.pointer_type(tl.int16), bitcast=True)
    b_word = tl.load(p + (o_i * (STRIDE // 2) + o_lane))
    if W.BITS == 8:  # not loaded as bytes: before RoPE what Triton 3.6 compiles of that is wrong
        b_word = tl.reshape(tl.join(b_word & 255, (b_word >> 8) & 255), (COUNT, 256))
    return b_word


@triton.jit
def operand(b_words, TILE: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr):
    """Return 1 + code / weight of one tile of tokens and a run of channels, or what is looked up: float16 [I, 256]."""
    R: tl.constexpr = S.RUNS[RUN]
    b_planes = ()
    for number in tl.static_range(len(R.PLANES)):
        b_planes = b_planes + (b_words[R.PLANES[number].WORDS],)
    if len(S.TABLES) > 0:
        b_x = _looked_up(b_planes, TILE, S, RUN)
    elif COMPILED:
        b_x = tl.inline_asm_elementwise(
            _assembly(R.PLANES, TILE), "=r" + ",r" * len(b_planes), b_planes, dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        b_x = (1.0 + _codes(b_planes, TILE, R).to(tl.float32) / weight(R.PLANES, TILE)).to(tl.float16)
    return b_x


@triton.jit
def point(b_words, TILE: tl.constexpr, S: tl.constexpr):
    """Return what a slab's codes of one tile of tokens stand for, S of SlabSettings: float16 [1, 256].

    A number of the table; without one, code - (2^BITS - 1) / 2.
    """
    PARTS: tl.constexpr = len(S.RUNS)
    RUN: tl.constexpr = TILE * PARTS // 8
    PLACE: tl.constexpr = TILE % (8 // PARTS)
    if len(S.TABLES) > 0:
        b_x = operand(b_words, PLACE, S, RUN)
    elif COMPILED:
        R: tl.constexpr = S.RUNS[RUN]
        b_planes = ()
        for number in tl.static_range(len(R.PLANES)):
            b_planes = b_planes + (b_words[R.PLANES[number].WORDS],)
        b_x = tl.inline_asm_elementwise(
            _centred_assembly(R.PLANES, PLACE, S.BITS), "=r" + ",r" * len(b_planes), b_planes,
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        factor = weight(S.RUNS[RUN].PLANES, PLACE)
        b_one = operand(b_words, PLACE, S, RUN).to(tl.float32)
        b_x = (b_one * factor - (factor + ((1 << S.BITS) - 1) / 2)).to(tl.float16)
    return b_x


@triton.jit
def _codes(b_planes, TILE: tl.constexpr, R: tl.constexpr):
    """In the interpreter, the codes of one tile of tokens and a run of channels: int32 [I, 256]."""
    b_code = b_planes[0].to(tl.int32) * 0
    for number in tl.static_range(len(R.PLANES)):
        WIDTH: tl.constexpr = R.PLANES[number].WIDTH
        b_bits = (b_planes[number].to(tl.int32) & 0xFFFF) >> (WIDTH * (R.PLANES[number].SLOT + TILE))
        b_code |= (b_bits & ((1 << WIDTH) - 1)) << R.PLANES[number].UP
    return b_code


@triton.jit
def rows_of_tokens(b_x, S: tl.constexpr, RUN: tl.constexpr):
    """Return [I, 256] as the operand [16 tokens, 16 · I channels]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    b_x = tl.permute(tl.reshape(b_x, (COUNT, 8, 4, 2, 2, 2)), (3, 1, 0, 4, 2, 5))
    return tl.reshape(b_x, (16, 16 * COUNT))


@triton.jit
def rows_of_channels(b_x, S: tl.constexpr, RUN: tl.constexpr):
    """Return [I, 256] as the operand [16 · I channels, 16 tokens]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    b_x = tl.permute(tl.reshape(b_x, (COUNT, 8, 4, 2, 2, 2)), (0, 3, 1, 4, 2, 5))
    return tl.reshape(b_x, (16 * COUNT, 16))


@triton.jit
def channels(S: tl.constexpr, RUN: tl.constexpr):
    """Return the stored channels of a run, in the order of the operand: int32 [16 · I]."""
    R: tl.constexpr = S.RUNS[RUN]
    FIRST: tl.constexpr = R.FIRST
    STEP: tl.constexpr = R.STEP
    COUNT: tl.constexpr = R.COUNT
    o_c = tl.arange(0, 16 * COUNT)
    return (FIRST + o_c // 16 * STEP) * 16 + o_c % 16


@triton.jit
def ones(S: tl.constexpr, RUN: tl.constexpr):
    """Return an operand that sums over the channels of a run: float16 [16, 16 · I]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    return tl.full((16, 16 * COUNT), 1.0, tl.float16)


@triton.jit
def no_sums(S: tl.constexpr, RUN: tl.constexpr, M: tl.constexpr):
    """Return zeros, float32 [16 · I, M]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    return tl.zeros((16 * COUNT, M), tl.float32)


# ---- codes that are looked up ----------------------------------------------------------------------------------------


@triton.jit
def _looked_up(b_planes, TILE: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr):
    """Return the numbers of one tile of tokens and a run of channels, as loaded: float16 [I, 256].

    b_planes   the containers of each plane
    """
    R: tl.constexpr = S.RUNS[RUN]
    PART: tl.constexpr = RUN * len(S.TABLES) // len(S.RUNS)
    if COMPILED:
        b_x = tl.inline_asm_elementwise(
            _table_assembly(R.PLANES, TILE, S.TABLES[PART]), "=r" + ",r" * len(b_planes), b_planes,
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_code = _codes(b_planes, TILE, R)
        b_x = tl.zeros(b_code.shape, tl.int32)
        for code in tl.static_range(len(S.TABLES[PART])):
            b_x = tl.where(b_code == code, S.TABLES[PART][code], b_x)
        b_x = b_x.to(tl.int16).to(tl.float16, bitcast=True)
    return b_x


@triton.constexpr_function
def _table_assembly(planes, tile, table):
    """Two containers of each plane become two float16. `table` has the bits of one for every stored code."""
    _, _, _, slot = planes[0]
    at = slot + tile
    if len(table) == 2:
        made = _signed("$1", 15 - at, f"{table[1] * 0x10001:#x}")
    elif len(table) == 4:
        made = _nibbles(2, at) + _picked(table) + _joined(at // 2 % 2, "$0")
    elif len(table) == 8:
        magnitudes = [table[2 * code + 1] for code in range(4)]
        made = _nibbles(2, at) + _picked(magnitudes) + _joined(at // 2 % 2, "y")
        made += _signed("$2", 15 - planes[1][3] - tile, "y")
    elif all(table[code] ^ 0x8000 == table[code + 8] for code in range(8)):
        made = _nibbles(3, at) + _picked(table[8:]) + _joined(at % 2, "y") + _signed("$1", 12 - 4 * at, "y")
    else:
        made = _nibbles(3, at) + _halves(at) + _selected(table) + _joined(at % 2, "$0")
    return "{ .reg .b32 x, y, n, s, m, p, q, l, h; " + made + "}"


@triton.constexpr_function
def _nibbles(bits, slot):
    """n: the low `bits` of the codes that are looked up together, two of each container, a nibble each.

    Of 2 bits they pick of the second word: SASS takes a constant there, and would copy one to a register before it.
    """
    each = 4 // bits  # codes of a nibble
    down, mask = slot % each * bits, ((1 << bits) - 1) * 0x11111111
    made = f"prmt.b32 x, $1, 0, {PAIRED.value}; "
    made += f"shr.b32 n, x, {down}; " if down else "mov.b32 n, x; "
    made += f"lop3.b32 n, n, {mask:#x}, {0x44444444 if bits == 2 else 0:#x}, 0xEA; "
    return made + ("shr.b32 n, n, 16; " if slot // (2 * each) else "")  # the upper bytes of the containers


@triton.constexpr_function
def _picked(table):
    """l and h: low and high bytes of four numbers, or of eight."""
    made = ""
    for name, words in zip("lh", _bytes(table), strict=True):  # Triton 3.6 takes no names inside names
        first, second = (words[0], words[1]) if len(table) > 4 else (0, words[0])
        made += f"prmt.b32 {name}, {first:#x}, {second:#x}, n; "
    return made


@triton.constexpr_function
def _bytes(table):
    """Return low bytes of up to eight numbers, as two words, and high ones."""
    eight = [*table, *[0] * (8 - len(table))]
    return [
        [sum((eight[first + i] >> shift & 255) << (8 * i) for i in range(4)) for first in (0, 4)] for shift in (0, 8)
    ]


@triton.constexpr_function
def _halves(slot):
    """m: a byte of ones for each of the four codes whose highest bit is set."""
    return f"shl.b32 s, x, 4; prmt.b32 m, s, x, {'0xFBEA' if slot // 2 else '0xD9C8'}; "


@triton.constexpr_function
def _selected(table):
    """As `_picked`, of sixteen."""
    made = ""
    for name, lower, upper in zip("lh", _bytes(table[:8]), _bytes(table[8:]), strict=True):
        made += f"prmt.b32 p, {lower[0]:#x}, {lower[1]:#x}, n; prmt.b32 q, {upper[0]:#x}, {upper[1]:#x}, n; "
        made += f"lop3.b32 {name}, p, q, m, 0xD8; "  # (q & m) | (p & ~m)
    return made


@triton.constexpr_function
def _joined(second, to):
    """Return the numbers of the first, or the second, code of both containers, of low bytes l and high bytes h."""
    return f"prmt.b32 {to}, l, h, {'0x7351' if second else '0x6240'}; "


@triton.constexpr_function
def _signed(word, up, number):
    """The number, negative where bit `15 - up` of a container is not set."""
    made = f"shl.b32 s, {word}, {up}; " if up else f"mov.b32 s, {word}; "
    return made + f"lop3.b32 $0, s, 0x80008000, {number}, 0xAE; "  # (~s & sign) | number
