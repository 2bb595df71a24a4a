"""Register-level operations on 32-bit words: load a token's bytes, select bytes (PRMT), multiply half2, build tiles.

A thread has two tokens, one beside the other, and all the words of both: so shifts and bytes are known at compile time.
A word is a uint32 tensor [N], one of each token; what a head has of them is a tuple.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.settings import COMPILED

PRMT = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
MUL_HALF2 = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def load_columns(p, o_row, m_row, STRIDE: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr):
    """COUNT elements of the rows o_row [N], STRIDE apart: a tuple of P words [N], zero beyond COUNT.

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
    """The BYTES of rows o_row [N]: a tuple of ⌈BYTES / 4⌉ words [N], loaded as many at once as rows are aligned to."""
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
    """The columns of [N, COUNT], a power of two: a tuple of COUNT tensors [N]."""
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
    """The logarithm of a power of two, a whole number."""
    return count.bit_length() - 1


@triton.jit
def build_tile(b_words, COUNT: tl.constexpr):
    """Words of two float16 each as a tile [N, 2 · COUNT], zero beyond the words there are."""
    b_parts = b_words + (tl.zeros_like(b_words[0]),) * (COUNT - len(b_words))
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
    """Four of the eight bytes of an int64, as the low four nibbles of b_which [N] say: words [N]."""
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
    """Four of the eight bytes of two words [N], by a nibble each: words [N].

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
    """Products of two words [N] of two float16 each: words [N]."""
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
