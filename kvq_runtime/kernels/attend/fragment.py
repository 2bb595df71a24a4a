"""Read codes that lie as the tensor core's operand A (ops/fragment.py): what a lane loads is its share, nothing moves.

A code stays in its 16-bit container and becomes the mantissa of a float16 with the exponent of 1: x = 1 + code /
`weight`. One operation does that for two containers (LOP3). Products are of x; the ones are subtracted afterwards, in
float32, from a whole sum at once. Codes of a codebook are looked up instead: see levels.py.

A tile in registers is [I, 256 = (8 g, 4 t, 2 r, 2 w, 2 h)]: of two dimensions every Triton gives a warp's lanes the
last one, 16 bytes each, so that tiles are loaded as they are multiplied.

Letters beside those of settings.py: I groups of 16 channels of a run · S tiles of tokens of a sub-block.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import levels
from kvq_runtime.kernels.attend.settings import COMPILED

# two channels of a pair, of two float16 each: $0, $1 = rotated (x - 1) step + low, see scores_of_pairs
TURNED_PAIR = tl.constexpr("""{
    .reg .b32 m, a, b, s, t;
    mov.b32 m, 0xBC00BC00; add.rn.f16x2 a, $2, m; add.rn.f16x2 b, $3, m;
    fma.rn.f16x2 a, a, $4, $6; fma.rn.f16x2 b, b, $5, $7;
    mul.rn.f16x2 s, b, $9; neg.f16x2 s, s; mul.rn.f16x2 t, a, $9;
    fma.rn.f16x2 $0, a, $8, s; fma.rn.f16x2 $1, b, $8, t;
}""")


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
    """The place of a code's lowest bit in the mantissa, by its first plane."""
    width, up, _, slot = planes[0]
    return _placed(width, slot + tile)[1] - up


@triton.constexpr_function
def weight(planes, tile):
    """Return the power of two that `operand` divides the codes of a tile by."""
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
    """All words of a sub-block, S of RoundedSettings: a tuple of int16 [I, 256]."""
    b_words = ()
    for number in tl.static_range(len(S.WORDS)):
        b_words = b_words + (_load(p_codes, S, number),)
    return b_words


@triton.jit
def _load(p_codes, S: tl.constexpr, NUMBER: tl.constexpr):
    """The words of one entry of WORDS: int16 [I, 256]."""
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
    """1 + code / weight of one tile of tokens and a run of channels, or what is looked up: float16 [I, 256]."""
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
    """[I, 256] as the operand [16 tokens, 16 · I channels]."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    b_x = tl.permute(tl.reshape(b_x, (COUNT, 8, 4, 2, 2, 2)), (3, 1, 0, 4, 2, 5))
    return tl.reshape(b_x, (16, 16 * COUNT))


@triton.jit
def rows_of_channels(b_x, S: tl.constexpr, RUN: tl.constexpr):
    """[I, 256] as the operand [16 · I channels, 16 tokens]."""
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


# ---- heads in pairs: channels 16 i + f and 16 i + 8 + f are those that RoPE rotates together, f below 8 -------------


@triton.jit
def frequencies(S: tl.constexpr, RUN: tl.constexpr):
    """RoPE's frequencies of a run: int32 [8 · I]."""
    R: tl.constexpr = S.RUNS[RUN]
    FIRST: tl.constexpr = R.FIRST
    STEP: tl.constexpr = R.STEP
    COUNT: tl.constexpr = R.COUNT
    o_f = tl.arange(0, 8 * COUNT)
    return (FIRST + o_f // 8 * STEP) * 8 + o_f % 8


@triton.jit
def pairs_of_lanes(S: tl.constexpr, RUN: tl.constexpr, EACH: tl.constexpr, APART: tl.constexpr):
    """Return the places of a run's left and right channels in lanes: int32 [2 · I, 64 = (8 g, 4 t, 2 h)].

    EACH    from one group of 16 channels to the next
    APART   from a left channel to its right one
    """
    R: tl.constexpr = S.RUNS[RUN]
    FIRST: tl.constexpr = R.FIRST
    STEP: tl.constexpr = R.STEP
    COUNT: tl.constexpr = R.COUNT
    o_r, o_c = tl.arange(0, 2 * COUNT)[:, None], tl.arange(0, 64)[None, :]
    o_f = o_c // 2 % 4 * 2 + o_c % 2  # written as o_c % 8, Triton would give a lane all eight
    return (FIRST + o_r // 2 * STEP) * EACH + o_r % 2 * APART + o_f


@triton.jit
def halves_of_pairs(b_x, S: tl.constexpr, RUN: tl.constexpr):
    """Split what was loaded from `pairs_of_lanes` into left and right channels: [I, 8 g, 4 t, 2 h] each."""
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    return tl.split(tl.permute(tl.reshape(b_x, (COUNT, 2, 8, 4, 2)), (0, 2, 3, 4, 1)))


@triton.jit
def angles_of_tile(p_table, i_tile, L: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr):
    """cos and sin of the positions of a tile in its block: float16 [I, 8 g, 4 t, 2 r, 2 h] each.

    p_table   as `RopeTables.block` has them, for keys before RoPE
    """
    R: tl.constexpr = S.RUNS[RUN]
    FIRST: tl.constexpr = R.FIRST
    STEP: tl.constexpr = R.STEP
    COUNT: tl.constexpr = R.COUNT
    o_i, o_lane = tl.arange(0, COUNT)[:, None], tl.arange(0, 256)[None, :]
    b_both = tl.load(p_table + (i_tile * (L.D // 16) + FIRST + o_i * STEP) * 256 + o_lane)
    return tl.split(tl.permute(tl.reshape(b_both, (COUNT, 8, 4, 2, 2, 2)), (0, 1, 2, 4, 5, 3)))


@triton.jit
def scores_of_pairs(b_x, b_steps, b_lows, b_angles, b_q, b_s, S: tl.constexpr, RUN: tl.constexpr):
    """Scores b_s [16, M] plus those of a tile whose channels are decoded and rotated: (x - 1) step + low.

    b_x               [I, 256], see `operand`
    b_steps, b_lows   of left and right channels, float16 [I, 8 g, 4 t, 2 h] each
    b_angles          cos and sin, float16 [I, 8 g, 4 t, 2 r, 2 h]
    b_q               left and right channels of the query, float16 [8 · I, M]
    """
    R: tl.constexpr = S.RUNS[RUN]
    COUNT: tl.constexpr = R.COUNT
    M: tl.constexpr = b_s.shape[1]
    b_left, b_right = tl.split(tl.permute(tl.reshape(b_x, (COUNT, 8, 4, 2, 2, 2)), (0, 1, 2, 3, 5, 4)))
    b_step1, b_step2 = b_steps[0][:, :, :, None, :], b_steps[1][:, :, :, None, :]
    b_low1, b_low2 = b_lows[0][:, :, :, None, :], b_lows[1][:, :, :, None, :]
    b_cos, b_sin = b_angles
    if COMPILED:
        b_left, b_right = tl.inline_asm_elementwise(
            TURNED_PAIR, "=&r,=&r,r,r,r,r,r,r,r,r",
            [b_left, b_right, b_step1, b_step2, b_low1, b_low2, b_cos, b_sin],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_left, b_right = (b_left - 1.0) * b_step1 + b_low1, (b_right - 1.0) * b_step2 + b_low2
        b_left, b_right = b_left * b_cos - b_right * b_sin, b_right * b_cos + b_left * b_sin
        b_left, b_right = b_left.to(tl.float16), b_right.to(tl.float16)
    if COUNT == 1:  # a product takes no fewer than 16 channels
        b_k = tl.permute(tl.join(b_left, b_right), (3, 1, 0, 5, 2, 4))
        b_both = tl.permute(tl.join(b_q[0], b_q[1]), (2, 0, 1))
        b_s = tl.dot(tl.reshape(b_k, (16, 16)), tl.reshape(b_both, (16, M)), b_s)
    else:
        b_s = tl.dot(tl.reshape(tl.permute(b_left, (3, 1, 0, 2, 4)), (16, 8 * COUNT)), b_q[0], b_s)
        b_s = tl.dot(tl.reshape(tl.permute(b_right, (3, 1, 0, 2, 4)), (16, 8 * COUNT)), b_q[1], b_s)
    return b_s
