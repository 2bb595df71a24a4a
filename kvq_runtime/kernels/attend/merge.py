"""Log-sum-exp merge of the splits; what came from the blocks is rotated back, once, and the exact splits are added.

out = (Σ 2^(lse_i - top) · mean_i) / Σ 2^(lse_i - top); the blocks' part is multiplied with the rotation first.
"""

import triton
import triton.language as tl


@triton.jit
def merge(
    p_part, p_lse, p_rotation, p_mean, p_out, p_out_lse, splits,
    H: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    EXACT: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (batch row, KV head), COLUMNS channels and M of R query rows, CHUNK splits at a time.

    p_part, p_lse       float32 [B · H, splits + EXACT, R, D] and [B · H, splits + EXACT, R], as kernel.py writes them
    p_rotation, p_mean  of the values: float32 [P, P] and [H, D], or None; not of the last EXACT splits
    p_out, p_out_lse    [B · H, R, D] in the queries' dtype, float32 [B · H, R]
    P                   D padded to a power of two
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_first = i_bh * (splits + EXACT)
    o_m, o_c = tl.program_id(2) * M + tl.arange(0, M), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    o_d = o_c if p_rotation is None else tl.arange(0, P)
    b_top = tl.full((M,), float("-inf"), tl.float32)
    for i_split in range(0, splits + EXACT, CHUNK):
        b_top = tl.maximum(b_top, tl.max(_load_lse(p_lse, i_first, i_split, splits + EXACT, o_m, R, CHUNK), 0))
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_total, b_sums = _summed(p_part, p_lse, i_first, 0, splits, b_top, o_m, o_d, R, D, CHUNK)
    if p_rotation is not None:
        b_sums = tl.dot(b_sums, tl.load(p_rotation + o_d[:, None] * P + o_c[None, :]), input_precision="tf32x3")
    if p_mean is not None:
        b_sums += b_total[:, None] * tl.load(p_mean + i_bh % H * D + o_c, mask=o_c < D, other=0.0)[None, :]
    b_share, b_exact = _summed(p_part, p_lse, i_first, splits, splits + EXACT, b_top, o_m, o_c, R, D, EXACT)
    b_total, b_sums = b_total + b_share, b_sums + b_exact
    b_some = tl.where(b_total > 0, b_total, 1.0)
    p = p_out + (i_bh * R + o_m)[:, None] * D + o_c[None, :]
    m = (o_m < R)[:, None] & (o_c < D)[None, :]
    tl.store(p, (b_sums / b_some[:, None]).to(p_out.dtype.element_ty), mask=m)
    if tl.program_id(1) == 0:
        p_level = p_out_lse + i_bh * R + o_m
        tl.store(p_level, tl.where(b_total > 0, b_top + tl.log2(b_some), float("-inf")), mask=o_m < R)


@triton.jit
def _summed(
    p_part, p_lse, i_first, start, stop, b_top, o_m, o_d, R: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(Σ 2^(lse - top), Σ 2^(lse - top) · mean) of splits start to stop: float32 [M] and [M, len(o_d)]."""
    b_total = tl.zeros((o_m.shape[0],), tl.float32)
    b_sums = tl.zeros((o_m.shape[0], o_d.shape[0]), tl.float32)
    for i_split in range(start, stop, CHUNK):
        b_share = tl.exp2(_load_lse(p_lse, i_first, i_split, stop, o_m, R, CHUNK) - b_top[None, :])
        o_s = i_split + tl.arange(0, CHUNK)
        o_x = (i_first + o_s)[:, None, None] * (R * D) + o_m[None, :, None] * D + o_d[None, None, :]
        m_x = (o_s < stop)[:, None, None] & (o_m < R)[None, :, None] & (o_d < D)[None, None, :]
        b_sums += tl.sum(b_share[:, :, None] * tl.load(p_part + o_x, mask=m_x, other=0.0), 0)
        b_total += tl.sum(b_share, 0)
    return b_total, b_sums


@triton.jit
def _load_lse(p_lse, i_first, i_split, stop, o_m, R: tl.constexpr, CHUNK: tl.constexpr):
    """The log-sum-exps of CHUNK splits, -inf from `stop` on: float32 [CHUNK, M]."""
    o_s = i_split + tl.arange(0, CHUNK)
    m_s = (o_s < stop)[:, None] & (o_m < R)[None, :]
    return tl.load(p_lse + (i_first + o_s)[:, None] * R + o_m[None, :], mask=m_s, other=float("-inf"))
