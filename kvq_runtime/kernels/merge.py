"""Merge the splits by their log-sum-exp, rotate back what came from the blocks, once, and add the exact split.

out = (Σ 2^(lse_i - top) · mean_i) / Σ 2^(lse_i - top); the blocks' part is multiplied with the rotation first.
"""

import triton
import triton.language as tl


@triton.jit
def merge(
    part, lse, turn, mean, out, level, splits,
    H: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    EXACT: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (row, KV head), COLUMNS channels and M queries, CHUNK splits at a time; the last EXACT as is.

    `turn` is float32 [P, P], `mean` float32 [H, D]; or None.
    """
    line = tl.program_id(0).to(tl.int64)
    first = line * (splits + EXACT)
    r, e = tl.program_id(2) * M + tl.arange(0, M), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    d = e if turn is None else tl.arange(0, P)
    top = tl.full((M,), float("-inf"), tl.float32)
    for split in range(0, splits + EXACT, CHUNK):
        top = tl.maximum(top, tl.max(_levels(lse, first, split, splits + EXACT, r, R, CHUNK), 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    total, sums = _summed(part, lse, first, 0, splits, top, r, d, R, D, CHUNK)
    if turn is not None:
        sums = tl.dot(sums, tl.load(turn + d[:, None] * P + e[None, :]), input_precision="tf32x3")
    if mean is not None:
        sums += total[:, None] * tl.load(mean + line % H * D + e, mask=e < D, other=0.0)[None, :]
    share, exact = _summed(part, lse, first, splits, splits + EXACT, top, r, e, R, D, EXACT)
    total, sums = total + share, sums + exact
    some = tl.where(total > 0, total, 1.0)
    to = out + (line * R + r)[:, None] * D + e[None, :]
    tl.store(to, (sums / some[:, None]).to(out.dtype.element_ty), mask=(r < R)[:, None] & (e < D)[None, :])
    if tl.program_id(1) == 0:
        tl.store(level + line * R + r, tl.where(total > 0, top + tl.log2(some), float("-inf")), mask=r < R)


@triton.jit
def _summed(
    part, lse, first, start, stop, top, r, d, R: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(Σ 2^(lse - top), that times the means) of some splits, [M] and [M, d]."""
    total = tl.zeros((r.shape[0],), tl.float32)
    sums = tl.zeros((r.shape[0], d.shape[0]), tl.float32)
    for split in range(start, stop, CHUNK):
        share = tl.exp2(_levels(lse, first, split, stop, r, R, CHUNK) - top[None, :])
        i = split + tl.arange(0, CHUNK)
        at = (first + i)[:, None, None] * (R * D) + r[None, :, None] * D + d[None, None, :]
        here = (i < stop)[:, None, None] & (r < R)[None, :, None] & (d < D)[None, None, :]
        sums += tl.sum(share[:, :, None] * tl.load(part + at, mask=here, other=0.0), 0)
        total += tl.sum(share, 0)
    return total, sums


@triton.jit
def _levels(lse, first, split, stop, r, R: tl.constexpr, CHUNK: tl.constexpr):
    """The log-sum-exps of CHUNK splits, -inf beyond the last, [CHUNK, M]."""
    i = split + tl.arange(0, CHUNK)
    here = (i < stop)[:, None] & (r < R)[None, :]
    return tl.load(lse + (first + i)[:, None] * R + r[None, :], mask=here, other=float("-inf"))
