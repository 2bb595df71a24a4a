"""Read codes that lie as the tensor core's operand A (ops/fragment.py): what a lane loads is its share, nothing moves.

A code stays in its 16-bit container and becomes the mantissa of a float16 with the exponent of 1: x = 1 + code /
`weight`. One operation does that for two containers (LOP3). Products are of x; the ones are subtracted afterwards, in
float32, from a whole sum at once. Codes of a codebook are looked up instead: see levels.py.

Letters beside those of settings.py: I groups of 16 channels of a run · S tiles of tokens of a sub-block.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import levels
from kvq_runtime.kernels.attend.settings import COMPILED


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
    """Where in the mantissa the lowest bit of a code is: its first plane says."""
    width, up, _, slot = planes[0]
    return _placed(width, slot + tile)[1] - up


@triton.constexpr_function
def weight(planes, tile):
    """What `operand` divides the codes of a tile by: a power of two."""
    return float(1 << (10 - _lowest(planes, tile)))


@triton.constexpr_function
def _assembly(planes, tile):
    """Two containers of each plane become two float16."""
    lowest, lines = _lowest(planes, tile), []
    for number in range(len(planes)):  # Triton 3.6 takes no names inside names
        width, up, _, slot = planes[number]
        down = (slot + tile) * width - lowest - up
        shift = "shr" if down > 0 else "shl"
        moved = f"{shift}.b32 t, ${number + 1}, {abs(down)};" if down else f"mov.b32 t, ${number + 1};"
        mask = ((1 << width) - 1 << (lowest + up)) * 0x00010001
        rest = "0x3C003C00" if number == 0 else "y"
        lines.append(f"{moved} lop3.b32 y, t, {mask:#x}, {rest}, 0xEA;")
    return "{ .reg .b32 t, y; " + " ".join(lines) + " mov.b32 $0, y; }"


@triton.jit
def load_words(p_codes, S: tl.constexpr):
    """All words of a sub-block, S of RoundedSettings: a tuple of int16 [I, 8 g, 32 = (4 t, 2 r, 2 w, 2 h)]."""
    b_words = ()
    for number in tl.static_range(len(S.WORDS)):
        b_words = b_words + (_load(p_codes, S, number),)
    return b_words


@triton.jit
def _load(p_codes, S: tl.constexpr, NUMBER: tl.constexpr):
    """The words that one of WORDS says: int16 [I, 8, 32]."""
    W: tl.constexpr = S.WORDS[NUMBER]
    START: tl.constexpr = W.START  # Triton 3.6 does not compute with a plain number
    STRIDE: tl.constexpr = W.STRIDE
    COUNT: tl.constexpr = W.COUNT
    o_i = tl.arange(0, COUNT)[:, None, None]
    o_lane = tl.arange(0, 8)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    if W.BITS == 16:
        p = (p_codes + START).to(tl.pointer_type(tl.int16), bitcast=True)
        b_word = tl.load(p + (o_i * (STRIDE // 2) + o_lane))
    else:
        b_word = tl.load(p_codes + START + (o_i * STRIDE + o_lane)).to(tl.int16)
    return b_word


@triton.jit
def operand(b_words, TILE: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr):
    """1 + code / weight of one tile of tokens and a run of channels, or what is looked up: float16 [I, 8, 32]."""
    R: tl.constexpr = S.RUNS[RUN]
    b_planes = ()
    for number in tl.static_range(len(R.PLANES)):
        b_planes = b_planes + (b_words[R.PLANES[number].WORDS],)
    if len(S.TABLES) > 0:
        b_x = levels.operand(b_planes, TILE, S, RUN)
    elif COMPILED:
        b_x = tl.inline_asm_elementwise(
            _assembly(R.PLANES, TILE), "=r" + ",r" * len(b_planes), b_planes, dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        b_code = b_planes[0].to(tl.int32) * 0
        for number in tl.static_range(len(R.PLANES)):
            WIDTH: tl.constexpr = R.PLANES[number].WIDTH
            b_bits = (b_planes[number].to(tl.int32) & 0xFFFF) >> (WIDTH * (R.PLANES[number].SLOT + TILE))
            b_code |= (b_bits & ((1 << WIDTH) - 1)) << R.PLANES[number].UP
        b_x = (1.0 + b_code.to(tl.float32) / weight(R.PLANES, TILE)).to(tl.float16)
    return b_x


@triton.jit
def rows_of_tokens(b_x, S: tl.constexpr, RUN: tl.constexpr):
    """[I, 8, 32] as the operand [16 tokens, 16 · I channels]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    b_x = tl.permute(tl.reshape(b_x, (COUNT, 8, 4, 2, 2, 2)), (3, 1, 0, 4, 2, 5))
    return tl.reshape(b_x, (16, 16 * COUNT))


@triton.jit
def rows_of_channels(b_x, S: tl.constexpr, RUN: tl.constexpr):
    """[I, 8, 32] as the operand [16 · I channels, 16 tokens]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    b_x = tl.permute(tl.reshape(b_x, (COUNT, 8, 4, 2, 2, 2)), (0, 3, 1, 4, 2, 5))
    return tl.reshape(b_x, (16 * COUNT, 16))


@triton.jit
def channels(S: tl.constexpr, RUN: tl.constexpr):
    """The stored channels of a run, in the order of the operand: int32 [16 · I]."""
    R: tl.constexpr = S.RUNS[RUN]
    FIRST: tl.constexpr = R.FIRST
    STEP: tl.constexpr = R.STEP
    COUNT: tl.constexpr = R.COUNT
    o_c = tl.arange(0, 16 * COUNT)
    return (FIRST + o_c // 16 * STEP) * 16 + o_c % 16


@triton.jit
def ones(S: tl.constexpr, RUN: tl.constexpr):
    """An operand that sums over the channels of a run: float16 [16, 16 · I]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    return tl.full((16, 16 * COUNT), 1.0, tl.float16)


@triton.jit
def no_sums(S: tl.constexpr, RUN: tl.constexpr, M: tl.constexpr):
    """Zeros, float32 [16 · I, M]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    return tl.zeros((16 * COUNT, M), tl.float32)


@triton.jit
def frequencies(S: tl.constexpr, RUN: tl.constexpr):
    """RoPE's frequency of each stored channel of a run, of a head in pairs: int32 [16 · I]."""
    o_c = channels(S, RUN)
    return o_c // 16 * 8 + o_c % 8


@triton.jit
def is_left(S: tl.constexpr, RUN: tl.constexpr):
    """Whether a stored channel is of the head's first half, of a head in pairs: [16 · I]."""
    return channels(S, RUN) % 16 < 8


@triton.jit
def channels_of_head(S: tl.constexpr, RUN: tl.constexpr, L: tl.constexpr):
    """The head's channels in the order in which a run stores them: int32 [16 · I]."""
    return frequencies(S, RUN) + tl.where(is_left(S, RUN), 0, L.D // 2) if S.PAIRS else channels(S, RUN)


@triton.jit
def partners(b_x):
    """[N, 16 · I], stored channels in pairs: in place of each the one that RoPE rotates it with."""
    N: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1]
    b_left, b_right = tl.split(tl.permute(tl.reshape(b_x, (N, C // 16, 2, 8)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(b_right, b_left), (0, 1, 3, 2)), (N, C))


@triton.jit
def angles_of_tile(p_table, i_tile, L: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr):
    """cos, and sin with the sign that a channel's partner gets, of a tile's positions in its block: float16 [16 tokens,
    16 · I stored channels] each.

    p_table   [tiles, D / 16, 2, 8 g, 4 t, 2 r, 2 h], see rope.py
    """
    R: tl.constexpr = S.RUNS[RUN]
    FIRST: tl.constexpr = R.FIRST
    STEP: tl.constexpr = R.STEP
    COUNT: tl.constexpr = R.COUNT
    o_i = tl.arange(0, COUNT)[:, None, None]
    o_lane = tl.arange(0, 8)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    p = p_table + (i_tile * (L.D // 16) + FIRST + o_i * STEP) * 256 + o_lane
    b_cos, b_sin = tl.load(p), tl.load(p + 128)
    return _both_halves(b_cos, b_cos, S, RUN), _both_halves(-b_sin, b_sin, S, RUN)


@triton.jit
def _both_halves(b_left, b_right, S: tl.constexpr, RUN: tl.constexpr):
    """[I, 8, 16 = (4 t, 2 r, 2 h)] of frequencies, for left and right channels, as [16 tokens, 16 · I channels]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    b_x = tl.join(tl.reshape(b_left, (COUNT, 8, 4, 2, 2)), tl.reshape(b_right, (COUNT, 8, 4, 2, 2)))
    return tl.reshape(tl.permute(b_x, (3, 1, 0, 5, 2, 4)), (16, 16 * COUNT))
