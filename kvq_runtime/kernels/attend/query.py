"""Load the queries of a KV head, rotated as its keys' blocks are: the columns of a tile, one of each head and token.

Only how many columns a tile has is compiled; how many of them are queries, and of how many tokens, is not, so that any
batch and any number of query tokens that pads to the same tile is served by the same machine code.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

ROTATED = tl.constexpr(64)  # channels that a product of the rotation takes at a time; all would lie in registers


class Query(NamedTuple):
    """The queries' argument of the scans.

    pointer    to [B, H, rows, D], any float dtype
    rotation   to float16 [D, D], of host.Encoded: q · (read · rotation) = (rotation · q) · read; or None
    rows       query heads of a KV head, times query tokens: row r is head r // tokens, token r % tokens
    first      row that is the first of this program's tile
    """

    pointer: Any
    rotation: Any
    rows: Any
    first: Any


@triton.jit
def load_query(q, scale, i_bh, o_d, m_d, L: tl.constexpr):
    """Channels o_d of a tile of queries, rotated, times `scale`: float32 [len(o_d), M], zero beyond the rows.

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
