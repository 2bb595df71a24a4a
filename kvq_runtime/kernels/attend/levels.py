"""Look codes up in registers: a codebook of at most 16 float16 numbers, without a load. Codes lie as in fragment.py.

The codebook is cut into a table of low bytes and one of high bytes. PRMT, a byte permute, picks four bytes of eight by
a nibble each: one picks the low bytes of four elements, another their high bytes, and a third puts those of two
together, which is what a register of the operand holds. How codes of a width are stored (`STORED`) and looked up:

    1 bit     the sign of one number
    2 bits    the code; four low bytes and four high ones are one table
    3 bits    2 bits of the magnitude, whose plane is as that of 2 bits, then the sign
    4 bits    the sign, then 3 bits of the magnitude; or, of numbers without symmetry, the code: PRMT from the lower
              and from the upper eight, and the code's highest bit selects

Source: the instruction PRMT, PTX ISA 9.7.9. Sign and magnitude: codebooks of ops/lloyd.py are odd.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.settings import COMPILED

PAIRED = tl.constexpr("0x3120")  # the two containers' bytes, those of the same codes side by side


@triton.jit
def operand(b_planes, TILE: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr):
    """The numbers of one tile of tokens and a run of channels, as loaded: float16 [I, 256].

    b_planes   the containers of each plane
    """
    R: tl.constexpr = S.RUNS[RUN]
    PART: tl.constexpr = RUN * len(S.TABLES) // len(S.RUNS)
    if COMPILED:
        b_x = tl.inline_asm_elementwise(
            assembly(R.PLANES, TILE, S.TABLES[PART]), "=r" + ",r" * len(b_planes), b_planes,
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_code = b_planes[0].to(tl.int32) * 0
        for number in tl.static_range(len(R.PLANES)):
            WIDTH: tl.constexpr = R.PLANES[number].WIDTH
            b_bits = (b_planes[number].to(tl.int32) & 0xFFFF) >> (WIDTH * (R.PLANES[number].SLOT + TILE))
            b_code |= (b_bits & ((1 << WIDTH) - 1)) << R.PLANES[number].UP
        b_x = tl.zeros(b_code.shape, tl.int32)
        for code in tl.static_range(len(S.TABLES[PART])):
            b_x = tl.where(b_code == code, S.TABLES[PART][code], b_x)
        b_x = b_x.to(tl.int16).to(tl.float16, bitcast=True)
    return b_x


@triton.constexpr_function
def assembly(planes, tile, table):
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
    """n: the low `bits` of the codes that are looked up together, two of each container, a nibble each."""
    each = 4 // bits  # codes of a nibble
    down, mask = slot % each * bits, ((1 << bits) - 1) * 0x11111111
    made = f"prmt.b32 x, $1, 0, {PAIRED.value}; "
    made += f"shr.b32 n, x, {down}; and.b32 n, n, {mask:#x}; " if down else f"and.b32 n, x, {mask:#x}; "
    return made + ("shr.b32 n, n, 16; " if slot // (2 * each) else "")  # the upper bytes of the containers


@triton.constexpr_function
def _picked(table):
    """l and h: low and high bytes of four numbers."""
    made = ""
    for name, words in zip("lh", _bytes(table), strict=True):  # Triton 3.6 takes no names inside names
        made += f"prmt.b32 {name}, {words[0]:#x}, {words[1]:#x}, n; "
    return made


@triton.constexpr_function
def _bytes(table):
    """Low bytes of up to eight numbers, as two words, and high ones."""
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
    """The numbers of the first, or the second, code of both containers, of low bytes l and high bytes h."""
    return f"prmt.b32 {to}, l, h, {'0x7351' if second else '0x6240'}; "


@triton.constexpr_function
def _signed(word, up, number):
    """The number, negative where bit `15 - up` of a container is not set."""
    made = f"shl.b32 s, {word}, {up}; " if up else f"mov.b32 s, {word}; "
    return made + f"lop3.b32 $0, s, 0x80008000, {number}, 0xAE; "  # (~s & sign) | number
