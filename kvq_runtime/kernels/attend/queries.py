"""The queries of a KV head, one of each head and token: load them, and sum values by the softmax of their scores.

They are the M columns of a tile. Only how many columns it has is compiled; how many of them are queries, and of how
many tokens, is not, so that any batch and any number of query tokens that pads to the same tile is served by the same
machine code. Queries are rotated as their keys' blocks are.

The softmax is online, a tile of tokens at a time, all in powers of two. The running state of M query rows, with
w = 2^(s - top):

    b_top    [M]      largest s + log2 scale[t], rounded up, so far: not of s, so that the weights which the tensor
                      cores take in float16, w · scale, are at most 1 whatever the scale
    b_total  [N, M]   Σ w, as N sums that are added up at the end
    b_sums   [P, M]   Σ w · scale[t] · tile[t], a tuple: one of each slot
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
ROTATED = tl.constexpr(64)  # channels that a product of the rotation takes at a time; all would lie in registers


class Query(NamedTuple):
    """Argument of the scans: the queries.

    pointer    to [B, H, rows, D], any float dtype
    rotation   to float16 [D, D], of layout.Layout: q · (read · rotation) = (rotation · q) · read; or None
    rows       query heads of a KV head, times query tokens: row r is head r // tokens, token r % tokens
    first      row that is the first of this program's tile
    """

    pointer: Any
    rotation: Any
    rows: Any
    first: Any


@triton.jit
def load_query(q, scale, i_bh, o_d, m_d, L: tl.constexpr):
    """Return channels o_d of a tile of queries, rotated, times `scale`: float32 [len(o_d), M], zero beyond the rows.

    The rotation is a product of the tensor cores in each program: 64 of their instructions for a head of 128, instead
    of a launch of its own.
    """
    M: tl.constexpr = L.M
    o_m = q.first + tl.arange(0, M)
    m_m = (o_m < q.rows)[None, :]
    p = q.pointer + (i_bh * q.rows + o_m)[None, :] * L.D
    if q.rotation is None:
        b_q = tl.load(p + o_d[:, None], mask=m_m & m_d[:, None], other=0.0).to(tl.float32) * scale
    else:
        b_q = tl.zeros((o_d.shape[0], M), tl.float32)
        for i in range(0, L.D, ROTATED):
            o_c = i + tl.arange(0, ROTATED)
            m_c = o_c < L.D
            b_x = tl.load(p + o_c[:, None], mask=m_m & m_c[:, None], other=0.0).to(tl.float32) * scale
            p_rows = q.rotation + o_d[:, None] * L.D + o_c[None, :]
            b_rows = tl.load(p_rows, mask=m_d[:, None] & m_c[None, :], other=0.0)
            b_q = tl.dot(b_rows, b_x.to(tl.float16), b_q)
    return b_q


@triton.jit
def capped(b_s, L: tl.constexpr):
    """Return scores, times log2 e, bounded as L says: CAP · tanh(s / CAP)."""
    if L.CAP > 0:
        b_s = L.CAP - 2 * L.CAP / (tl.exp2(b_s * (2 * LOG2E / L.CAP)) + 1)
    return b_s


class Part(NamedTuple):
    """Where a program writes its results.

    mean, lse       pointers to float32 [lines, parts, rows, D] and [lines, rows, parts]
    line, number    which of the lines and parts; parts, how many
    rows, first     of queries, and the program's first
    """

    mean: Any
    lse: Any
    line: Any
    number: Any
    parts: Any
    rows: Any
    first: Any


@triton.jit
def empty(N: tl.constexpr, L: tl.constexpr, S: tl.constexpr):
    """Return the state of no token, for tiles of N tokens of values that S reads."""
    M: tl.constexpr = L.M
    P: tl.constexpr = S.P
    SLOTS: tl.constexpr = S.SLOTS
    b_sums = (tl.zeros((P, M), tl.float32),) * SLOTS
    b_top = tl.full((M,), float("-inf"), tl.float32)
    return b_top, tl.zeros((N, M), tl.float32), b_sums


@triton.jit
def add(b_state, b_s, b_tiles, b_numbers):
    """Add a tile of tokens to a state: scores b_s [N, M], -inf where masked; values b_tiles, [N, P] of each slot.

    b_numbers   the scale of each token [N], or ()
    """
    b_top, b_total, b_sums = b_state
    b_level = b_s
    if len(b_numbers) > 0:
        b_level = b_s + exponent(b_numbers[0])[:, None]
    b_higher = tl.maximum(b_top, tl.max(b_level, 0))
    b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_fade = tl.exp2(b_top - b_base)
    b_w = tl.exp2(b_s - b_base[None, :])
    b_total = b_total * b_fade[None, :] + b_w
    if len(b_numbers) > 0:
        b_w = b_w * b_numbers[0][:, None]
    b_faded = ()
    for slot in tl.static_range(len(b_tiles)):
        b_sum = b_sums[slot] * b_fade[None, :]
        b_p = b_w.to(b_tiles[slot].dtype)
        b_faded = b_faded + (tl.dot(tl.trans(b_tiles[slot]), b_p, b_sum, input_precision="ieee"),)
    return b_higher, b_total, b_faded


@triton.jit
def exponent(b_x):
    """Return log2 of |x| rounded up, from the bits of a float32 [N]; at least 2^-24."""
    return tl.maximum((b_x.to(tl.int32, bitcast=True) >> 23) & 255, 102).to(tl.float32) - 126.0


@triton.jit
def store(b_state, part, L: tl.constexpr, S: tl.constexpr):
    """Write a split's mean of the values and log2 Σ 2^s, of no token 0 and -inf."""
    b_share, p_mean, m_m = store_level(b_state[0], b_state[1], part, L)
    o_c = tl.arange(0, S.P)[:, None]
    for slot in tl.static_range(tl.constexpr(S.SLOTS)):
        o_d = slot * S.COLUMNS + o_c
        tl.store(p_mean + o_d, b_state[2][slot] * b_share, mask=m_m & (o_c < S.COLUMNS) & (o_d < L.D))


@triton.jit
def store_level(b_top, b_total, part, L: tl.constexpr):
    """Write log2 Σ 2^s of a split; return 1 / Σ 2^s, where its mean is, and which rows there are: [1, M] each."""
    b_sum = tl.sum(b_total, 0)
    b_some = tl.where(b_sum > 0, b_sum, 1.0)
    o_m = part.first + tl.arange(0, L.M)
    b_lse = tl.where(b_sum > 0, b_top + tl.log2(b_some), float("-inf"))
    tl.store(part.lse + (part.line * part.rows + o_m) * part.parts + part.number, b_lse, mask=o_m < part.rows)
    p_mean = part.mean + ((part.line * part.parts + part.number) * part.rows + o_m)[None, :] * L.D
    return tl.where(b_sum > 0, 1 / b_some, 0.0)[None, :], p_mean, (o_m < part.rows)[None, :]
