"""Split-K decode attention to keys and values that are stored as angles and radii (PolarQuant), N tokens at a time.

A tile is read by the tree of products from the radii down to the elements. Heads have 16 to 128 channels, a power of
two: at every level the words of values are pairs (i, i + half of the level's values), so that cos and sin of the codes
(i, i + half) are two words of the level below, and nothing is moved between threads, or inside a word. torch decodes
other heads, widths and radii.

A thread has two tokens, one beside the other, and all words of both: so shifts and bytes are known at compile time. A
word is a uint32 tensor [N], one of each token, of two float16; what a head has of them is a tuple. A code of two bits
selects its cos from the eight bytes of four float16 (PRMT, a byte permute); one of four bits selects low and high bytes
from eight each, and its highest bit the sign, or the upper eight.

    b_tiles, b_numbers = read_angles(...)     x̂[t, c] = scale[t] · tile[t, c]

`b_tiles` is a tuple of S.SLOTS tiles float16 [N, S.P], slot i the columns [i · COLUMNS, (i + 1) · COLUMNS); column
2 i + l of a head is coordinate i + l · D / 2. `b_numbers` is (scale,), float32 [N], or (): radii are in the tiles.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import queries, rope
from kvq_runtime.kernels.attend.arguments import CODES, COMPILED, field_of

RADII = tl.constexpr(1)  # the field beside CODES
ONES = tl.constexpr(0x10101010)
PRMT = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
MUL_HALF2 = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")
AFTER = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 $0, $1, zero, zero; }")


@triton.jit
def scan(
    q, q_exact, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, i_first, i_last, i_b, i_h, start,
    part, L: tl.constexpr, SCORES: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """The loop over the blocks of a split, see kernel.py. `p_rope` is not None if the mean of keys was removed."""
    N: tl.constexpr = L.N
    M: tl.constexpr = L.M
    o_c = tl.arange(0, KS.P)
    b_q = ()
    for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
        o_d = slot * KS.COLUMNS + o_c
        b_q = b_q + (queries.load_query(q, scale, i_b * L.H + i_h, o_d, o_d < L.D, L).to(tl.float16),)
    i_first = tl.maximum(i_first, start // L.T)
    b_state = queries.empty(N, L, VS)
    for i_block in range(i_first, i_last):
        b_mean = rope.mean_of_block(q_exact, scale, p_rope, i_b, i_h, i_block, L)
        for i_tile in tl.range((L.T + N - 1) // N, disable_licm=True):
            o_t = i_tile * N + tl.arange(0, N)
            m_t = o_t < L.T
            b_tiles, b_numbers = read_angles(p_keys, p_key_lookup, i_block, i_b, i_h, o_t, m_t, L, KS)
            b_s = tl.zeros((N, M), tl.float32)
            for slot in tl.static_range(tl.constexpr(KS.SLOTS)):
                b_s = tl.dot(b_tiles[slot], b_q[slot], b_s)
            if len(b_numbers) > 0:
                b_s = b_s * b_numbers[0][:, None]
            b_s = queries.capped(rope.add_mean(b_s, b_mean, p_rope, i_tile, i_block, L), L)
            b_s = tl.where((m_t & (i_block * L.T + o_t >= start))[:, None], b_s, float("-inf"))
            b_tiles, b_numbers = read_angles(p_values, p_value_lookup, i_block, i_b, i_h, o_t, m_t, L, VS)
            b_state = queries.add(b_state, b_s, b_tiles, b_numbers)
    queries.store(b_state, part, L, VS)


@triton.jit
def read_angles(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L: tl.constexpr, S: tl.constexpr):
    """Return SLOTS tiles [N, P], and the scale [N] or no number, of tokens o_t of a block, of which m_t are there.

    p_lookup   layout.py's `_lookup`
    """
    LEVELS: tl.constexpr = S.LEVELS
    COUNT: tl.constexpr = L.D >> LEVELS  # radii of a head
    BYTES: tl.constexpr = bytes_of(L.D, LEVELS)
    ROWS: tl.constexpr = L.H * L.T
    o_row = o_t * L.H + i_h
    b_words = load_words(field_of(p_table, i_block, i_b, CODES, 2, ROWS * BYTES, tl.uint8, L), o_row, m_t, BYTES)
    p_radii = field_of(p_table, i_block, i_b, RADII, 2, ROWS * COUNT * 2, tl.uint16, L)
    b_numbers = ()
    if COUNT == 1:
        b_radius = tl.load(p_radii + o_row, mask=m_t, other=0).to(tl.uint16).to(tl.float16, bitcast=True)
        b_numbers = (b_radius.to(tl.float32),)
        b_cos, b_sin = _short(b_words, p_lookup, 0, 0, LEVELS - 1, L.D, LEVELS)
        b_values = (select_bytes(b_cos, b_sin, 0x5410),)
    else:
        b_values = _load_radii(p_radii, o_row, m_t, COUNT)
    FIRST: tl.constexpr = 1 if COUNT == 1 else 0
    DONE: tl.constexpr = FIRST + log2(max(1, S.SLOTS // len(b_values)))  # levels that slots share
    for up in tl.static_range(FIRST, DONE):
        b_values = _below(b_words, b_values, p_lookup, 0, L.D >> (LEVELS + 1 - up), LEVELS - 1 - up, L.D, S)
    tl.debug_barrier()  # before the products, not between them and the stores of a tile
    b_tiles = ()
    EACH: tl.constexpr = len(b_values) // S.SLOTS
    for slot in tl.static_range(tl.constexpr(S.SLOTS)):
        b_slot = ()
        for i in tl.static_range(EACH):
            b_slot = b_slot + (b_values[slot * EACH + i],)
        for up in tl.static_range(DONE, LEVELS):
            b_slot = _below(
                b_words, b_slot, p_lookup, slot * (EACH << (up - DONE)), L.D >> (LEVELS + 1 - up), LEVELS - 1 - up,
                L.D, S,
            )  # fmt: skip
        b_tiles = b_tiles + (build_tile(b_slot, S.P // 2),)
        b_words = _after(b_words, b_slot[len(b_slot) - 1])
    return b_tiles, b_numbers


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


# ---- one level of pairs: multiply radii by cos and sin of their codes ------------------------------------------------


@triton.jit
def _below(
    b_words, b_values, p_lookup, START: tl.constexpr, HALF: tl.constexpr, LEVEL: tl.constexpr, D: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Return the values of the level below, two words for each: times cos, times sin of its codes, from code START on.

    LEVEL   from 0, the lowest
    HALF    of the level's codes
    """
    b_below = ()
    if LEVEL > 0:
        for i in tl.static_range(len(b_values)):
            b_cos, b_sin = _short(b_words, p_lookup, START + i, HALF, LEVEL, D, S.LEVELS)
            b_below = b_below + (multiply_half2(b_values[i], b_cos), multiply_half2(b_values[i], b_sin))
    else:
        for i in tl.static_range(0, len(b_values), 2):
            b_cos, b_sin = _long(b_words, p_lookup, START + i, S)
            for k in tl.static_range(2):
                b_below = b_below + (multiply_half2(b_values[i + k], b_cos[k]),)
                b_below = b_below + (multiply_half2(b_values[i + k], b_sin[k]),)
    return b_below


@triton.jit
def _short(
    b_words, p_lookup, CODE: tl.constexpr, HALF: tl.constexpr, LEVEL: tl.constexpr, D: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Return (cos, sin) of the codes CODE and CODE + HALF, of two bits: a word each."""
    NEAR: tl.constexpr = place_of(CODE, LEVEL, D, LEVELS)
    FAR: tl.constexpr = place_of(CODE + HALF, LEVEL, D, LEVELS)
    # a byte with a nibble for the place of each byte of a code's float16
    b_near = ((b_words[NEAR // 32] >> (NEAR % 8)) & 0x03030303) * 0x22 + ONES
    b_far = ((b_words[FAR // 32] >> (FAR % 8)) & 0x03030303) * 0x22 + ONES
    b_which = select_bytes(b_near, b_far, NEAR // 8 % 4 + (4 + FAR // 8 % 4) * 16)
    p_points = p_lookup + 2 * (LEVEL - 1)
    return lookup_bytes(tl.load(p_points), b_which), lookup_bytes(tl.load(p_points + 1), b_which)


@triton.jit
def _long(b_words, p_lookup, CODE: tl.constexpr, S: tl.constexpr):
    """Return (cos, sin) of the codes CODE, even, and CODE + 1, of four bits: each two words, a pair of codes each.

    A byte has the two codes of a pair, and two bytes are read at once.
    """
    b_four = b_words[CODE // 4]
    b_which = (b_four >> (CODE % 4 * 8)) & 0x7777
    b_highest = select_bytes(b_four << 4, b_four, 0x5140 + 0x2222 * (CODE % 4 // 2))  # the highest bit of each byte
    p_points = p_lookup + 2 * (S.LEVELS - 1)
    b_found = ()
    for part in tl.static_range(4):  # low and high bytes of cos, of sin
        b_bytes = lookup_bytes(tl.load(p_points + part), b_which)
        if S.MIRRORED == 0:
            b_upper = lookup_bytes(tl.load(p_points + 4 + part), b_which)
            b_mask = select_bytes(b_highest, b_highest, 0xBA98)
            b_bytes = (b_bytes & ~b_mask) | (b_upper & b_mask)
        elif part % 2 == 1:
            b_bytes = b_bytes ^ (b_highest & 0x80808080)
        b_found = b_found + (b_bytes,)
    b_cos = (select_bytes(b_found[0], b_found[1], 0x5140), select_bytes(b_found[0], b_found[1], 0x7362))
    b_sin = (select_bytes(b_found[2], b_found[3], 0x5140), select_bytes(b_found[2], b_found[3], 0x7362))
    return b_cos, b_sin


@triton.constexpr_function
def bytes_of(size, levels):
    """Return the bytes of a head's codes: one run of 4 bits, one of 2; see ops/pack.py."""
    return size // 4 + (size // 2 - (size >> levels) + 3) // 4


@triton.constexpr_function
def place_of(code, level, size, levels):
    """Return the bit among a head's codes at which a code of a level above the lowest begins."""
    length = (size // 2 - (size >> levels) + 3) // 4
    number = (size >> 1) - (size >> level) + code  # in the run of 2 bits
    return 8 * (size // 4 + number % length) + number // length * 2


@triton.jit
def _load_radii(p_radii, o_row, m_row, COUNT: tl.constexpr):
    """Return radii, an even COUNT of float16: words [N] of the pairs (i, i + COUNT / 2)."""
    b_x = load_columns(p_radii, o_row, m_row, COUNT, COUNT, COUNT)
    b_pairs = ()
    for i in tl.static_range(COUNT // 2):
        b_pairs = b_pairs + (b_x[i] | (b_x[i + COUNT // 2] << 16),)
    return b_pairs


# ---- words -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_columns(p, o_row, m_row, STRIDE: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr):
    """Return COUNT elements of the rows o_row [N], STRIDE apart: a tuple of P words [N], zero beyond COUNT.

    A thread has two rows, one beside the other.
    """
    o_c = tl.arange(0, P)[None, :]
    o_rows = tl.split(tl.reshape(o_row, (o_row.shape[0] // 2, 2)))
    m_rows = tl.split(tl.reshape(m_row, (o_row.shape[0] // 2, 2)))
    b_even = tl.load(p + (o_rows[0] * STRIDE)[:, None] + o_c, mask=m_rows[0][:, None] & (o_c < COUNT), other=0)
    b_odd = tl.load(p + (o_rows[1] * STRIDE)[:, None] + o_c, mask=m_rows[1][:, None] & (o_c < COUNT), other=0)
    b_evens, b_odds = split_columns(b_even.to(tl.uint32), P), split_columns(b_odd.to(tl.uint32), P)
    b_columns = ()
    for i in tl.static_range(P):
        b_columns = b_columns + (tl.reshape(tl.join(b_evens[i], b_odds[i]), o_row.shape),)
    return b_columns


@triton.jit
def load_words(p_codes, o_row, m_row, BYTES: tl.constexpr):
    """Load the BYTES of rows o_row [N], as many at once as rows are aligned to: a tuple of ⌈BYTES / 4⌉ words [N]."""
    b_words = ()
    if BYTES % 16 == 0:
        for i in tl.static_range(BYTES // 16):
            p = (p_codes + i * 16).to(tl.pointer_type(tl.uint32))
            b_words = b_words + load_columns(p, o_row, m_row, BYTES // 4, 4, 4)
    else:
        EACH: tl.constexpr = 4 if BYTES % 4 == 0 else (2 if BYTES % 2 == 0 else 1)
        UNIT: tl.constexpr = tl.uint32 if EACH == 4 else (tl.uint16 if EACH == 2 else tl.uint8)
        COUNT: tl.constexpr = BYTES // EACH
        P: tl.constexpr = triton.next_power_of_2(BYTES) // EACH
        b_units = load_columns(p_codes.to(tl.pointer_type(UNIT)), o_row, m_row, COUNT, COUNT, P)
        for i in tl.static_range((BYTES + 3) // 4):
            b_word = b_units[i * (4 // EACH)]
            for k in tl.static_range(1, 4 // EACH):
                b_word = b_word | (b_units[i * (4 // EACH) + k] << (8 * EACH * k))
            b_words = b_words + (b_word,)
    return b_words


@triton.jit
def split_columns(b_x, COUNT: tl.constexpr):
    """Return the columns of [N, COUNT], a power of two: a tuple of COUNT tensors [N]."""
    b_parts = (b_x,)
    for step in tl.static_range(log2(COUNT)):
        b_halves = ()
        for part in tl.static_range(1 << step):
            b_pairs = tl.reshape(b_parts[part], (b_x.shape[0], 2, COUNT >> (step + 1)))
            b_halves = b_halves + tl.split(tl.permute(b_pairs, (0, 2, 1)))
        b_parts = b_halves
    b_columns = ()
    for i in tl.static_range(COUNT):
        b_columns = b_columns + (tl.reshape(b_parts[i], (b_x.shape[0],)),)
    return b_columns


@triton.constexpr_function
def log2(count):
    """Return the logarithm of a power of two, a whole number."""
    return count.bit_length() - 1


@triton.jit
def build_tile(b_words, COUNT: tl.constexpr):
    """Join COUNT words of two float16 each in a tile [N, 2 · COUNT]."""
    b_parts = b_words
    for step in tl.static_range(log2(COUNT)):
        b_joined = ()
        for i in tl.static_range(COUNT >> (step + 1)):
            b_both = tl.join(b_parts[i], b_parts[i + (COUNT >> (step + 1))])
            b_joined = b_joined + (tl.reshape(b_both, (b_words[0].shape[0], 2 << step)),)
        b_parts = b_joined
    b_low = b_parts[0].to(tl.uint16).to(tl.float16, bitcast=True)
    b_high = (b_parts[0] >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(b_low, b_high), (b_words[0].shape[0], 2 * COUNT))


@triton.jit
def lookup_bytes(b_table, b_which):
    """Return four of the eight bytes of an int64, as the low four nibbles of b_which [N] say: words [N]."""
    if COMPILED:
        b_low, b_high = b_table.to(tl.uint32), (b_table >> 32).to(tl.uint32)
        b_x = tl.inline_asm_elementwise(
            PRMT, "=r,r,r,r", [b_low, b_high, b_which], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        b_x = tl.zeros_like(b_which)
        for i in tl.static_range(4):
            b_byte = b_table >> (((b_which >> (4 * i)) & 7) * 8).to(tl.int64)
            b_x |= (b_byte & 255).to(tl.uint32) << (8 * i)
    return b_x


@triton.jit
def select_bytes(b_first, b_second, BYTES: tl.constexpr):
    """Return four of the eight bytes of two words [N], by a nibble each: words [N].

    With a nibble's highest bit, the byte's highest bit, eight times.
    """
    if COMPILED:
        b_x = tl.inline_asm_elementwise(
            _prmt(BYTES), "=r,r,r", [b_first, b_second], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        b_x = tl.zeros_like(b_first)
        for i in tl.static_range(4):
            which: tl.constexpr = (BYTES >> (4 * i)) & 15
            b_byte = ((b_first if which & 4 == 0 else b_second) >> (which % 4 * 8)) & 255
            if which & 8 != 0:
                b_byte = (b_byte >> 7) * 255
            b_x |= b_byte << (8 * i)
    return b_x


@triton.constexpr_function
def _prmt(nibbles):
    return f"prmt.b32 $0, $1, $2, {nibbles:#x};"


@triton.jit
def multiply_half2(b_first, b_second):
    """Return products of two words [N] of two float16 each: words [N]."""
    if COMPILED:
        b_x = tl.inline_asm_elementwise(
            MUL_HALF2, "=r,r,r", [b_first, b_second], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        b_x = tl.zeros_like(b_first)
        for i in tl.static_range(2):
            b_a = (b_first >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)
            b_b = (b_second >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)
            b_x |= (b_a * b_b).to(tl.uint16, bitcast=True).to(tl.uint32) << (16 * i)
    return b_x
