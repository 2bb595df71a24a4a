"""Read a tile of tokens that are rounded in several groups of a head's channels: KIVI's and SQuat's values.

One slot, decoded: what scales and lows multiply is an element, not a score. Every byte is read once.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend.block_table import CODES, LOW, SCALE, field_of


@triton.jit
def codes_of_groups(p_groups, m_groups, GROUP: tl.constexpr, BITS: tl.constexpr):
    """All codes of the groups whose bytes begin at the pointers [A, B], where the mask [A, B]: int32 [A, B, GROUP]."""
    A: tl.constexpr = p_groups.shape[0]
    B: tl.constexpr = p_groups.shape[1]
    b_code = tl.zeros((A, B, GROUP), tl.int32)
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            o_byte, o_stream = tl.arange(0, GROUP * (8 >> log) // 8), tl.arange(0, 1 << log)
            # what the wider planes hold comes first
            p = p_groups[:, :, None] + GROUP * (BITS - BITS % (16 >> log)) // 8 + o_byte[None, None, :]
            b_byte = tl.load(p, mask=m_groups[:, :, None], other=0).to(tl.int32)
            b_bits = (b_byte[:, :, None, :] >> (o_stream * (8 >> log))[None, None, :, None]) & ((1 << (8 >> log)) - 1)
            b_code |= tl.reshape(b_bits, (A, B, GROUP)) << (BITS - BITS % (16 >> log))
    return b_code


@triton.jit
def groups(p_table, p_lookup, i_block, i_b, i_h, o_t, m_t, L: tl.constexpr, S: tl.constexpr):
    """A reader, see read.py, S of GroupSettings: one tile [N, P], decoded, and no numbers."""
    FIELDS: tl.constexpr = 2 + S.HAS_LOW
    GROUPS: tl.constexpr = L.D // S.GROUP
    BYTES: tl.constexpr = S.GROUP * S.BITS // 8
    NUMBERS: tl.constexpr = L.H * L.T * GROUPS * 2
    o_g = tl.arange(0, S.P // S.GROUP)[None, :]
    o_groups, m_groups = ((o_t * L.H + i_h) * GROUPS)[:, None] + o_g, m_t[:, None] & (o_g < GROUPS)
    p_codes = field_of(p_table, i_block, i_b, CODES, FIELDS, L.H * L.T * GROUPS * BYTES, tl.uint8)
    b_code = codes_of_groups(p_codes + o_groups * BYTES, m_groups, S.GROUP, S.BITS)
    p_scale = field_of(p_table, i_block, i_b, SCALE, FIELDS, NUMBERS, tl.float16)
    b_scale = tl.load(p_scale + o_groups, mask=m_groups, other=0.0).to(tl.float32)
    if S.HAS_LOW == 1:
        p_low = field_of(p_table, i_block, i_b, LOW, FIELDS, NUMBERS, tl.float16)
        b_low = tl.load(p_low + o_groups, mask=m_groups, other=0.0).to(tl.float32)
    else:
        b_low = b_scale * (-((1 << S.BITS) - 1) / 2)
    b_x = b_code.to(tl.float32) * b_scale[:, :, None] + b_low[:, :, None]
    return (tl.reshape(b_x, (m_t.shape[0], S.P)).to(tl.float16),), ()
