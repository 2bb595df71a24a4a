"""Hold a token's bytes and values in a thread, as words of 32 bits: load them, pick and multiply parts, make tiles.

A thread has two tokens, one beside the other, and all the words of both: so shifts and bytes are known beforehand.
"""

import triton
import triton.language as tl

PICK = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
MULTIPLY = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def rows(pointer, at, here, STRIDE: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr):
    """COUNT elements of each token, a tuple of P [N]; a thread has two tokens, one beside the other."""
    j = tl.arange(0, P)[None, :]
    ats = tl.split(tl.reshape(at, (at.shape[0] // 2, 2)))
    heres = tl.split(tl.reshape(here, (at.shape[0] // 2, 2)))
    first = tl.load(pointer + (ats[0] * STRIDE)[:, None] + j, mask=heres[0][:, None] & (j < COUNT), other=0)
    second = tl.load(pointer + (ats[1] * STRIDE)[:, None] + j, mask=heres[1][:, None] & (j < COUNT), other=0)
    one, two = parted(first.to(tl.uint32), P), parted(second.to(tl.uint32), P)
    columns = ()
    for i in tl.static_range(P):
        columns = columns + (tl.reshape(tl.join(one[i], two[i]), at.shape),)
    return columns


@triton.jit
def loaded(codes, at, here, BYTES: tl.constexpr):
    """A head's bytes as words, a tuple of uint32 [N]; loaded by as many at once as heads are aligned to."""
    words = ()
    if BYTES % 16 == 0:
        for i in tl.static_range(BYTES // 16):
            part = (codes + i * 16).to(tl.pointer_type(tl.uint32))
            words = words + rows(part, at, here, BYTES // 4, 4, 4)
    else:
        EACH: tl.constexpr = 4 if BYTES % 4 == 0 else (2 if BYTES % 2 == 0 else 1)
        UNIT: tl.constexpr = tl.uint32 if EACH == 4 else (tl.uint16 if EACH == 2 else tl.uint8)
        COUNT: tl.constexpr = BYTES // EACH
        units = rows(codes.to(tl.pointer_type(UNIT)), at, here, COUNT, COUNT, triton.next_power_of_2(BYTES) // EACH)
        for i in tl.static_range((BYTES + 3) // 4):
            word = units[i * (4 // EACH)]
            for k in tl.static_range(1, 4 // EACH):
                word = word | (units[i * (4 // EACH) + k] << (8 * EACH * k))
            words = words + (word,)
    return words


@triton.jit
def parted(x, COUNT: tl.constexpr):
    """The columns of [N, COUNT], a power of two: a tuple of [N]."""
    parts = (x,)
    for step in tl.static_range(log(COUNT)):
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
def log(count):
    return count.bit_length() - 1


@triton.jit
def tile(words, COUNT: tl.constexpr):
    """Words of two float16 as a tile [N, 2 · COUNT], zero beyond them."""
    parts = words + (tl.zeros_like(words[0]),) * (COUNT - len(words))
    for step in tl.static_range(log(COUNT)):
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
        low, high = table.to(tl.uint32), (table >> 32).to(tl.uint32)
        x = tl.inline_asm_elementwise(
            PICK, "=r,r,r,r", [low, high, which], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        x = tl.zeros_like(which)
        for i in tl.static_range(4):
            byte = table >> (((which >> (4 * i)) & 7) * 8).to(tl.int64)
            x |= (byte & 255).to(tl.uint32) << (8 * i)
    return x


@triton.jit
def mixed(one, two, BYTES: tl.constexpr, COMPILED: tl.constexpr):
    """Four of the eight bytes of two words, by a nibble each; with its highest bit, the byte's highest, eight times."""
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
            MULTIPLY, "=r,r,r", [one, two], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        x = tl.zeros_like(one)
        for i in tl.static_range(2):
            a = (one >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)
            b = (two >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True)
            x |= (a * b).to(tl.uint16, bitcast=True).to(tl.uint32) << (16 * i)
    return x
