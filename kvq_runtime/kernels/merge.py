"""Merge the splits by their log-sum-exp, rotate back what came from the blocks, once, and add the exact split.

out = (Σ 2^(lse_i - top) · mean_i) / Σ 2^(lse_i - top); the blocks' part is multiplied with the rotation first.
"""

import triton
import triton.language as tl


@triton.jit
def merge(
    part, lse, turn, mean, out, level,
    H: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (row, KV head) and COLUMNS channels. `turn` is float32 [P, P], `mean` float32 [H, D]; or None."""
    line = tl.program_id(0).to(tl.int64)
    r, e = tl.arange(0, M), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    d = e if turn is None else tl.arange(0, P)
    top = tl.full((M,), float("-inf"), tl.float32)
    for split in range(SPLITS + 1):
        top = tl.maximum(top, _level(lse, line, split, r, R, SPLITS))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, d.shape[0]), tl.float32)
    at = part + line * ((SPLITS + 1) * R * D) + r[:, None] * D
    for split in range(SPLITS):
        share = tl.exp2(_level(lse, line, split, r, R, SPLITS) - top)
        total += share
        here = (r < R)[:, None] & (d < D)[None, :]
        sums += share[:, None] * tl.load(at + split * (R * D) + d[None, :], mask=here, other=0.0)
    if turn is not None:
        sums = tl.dot(sums, tl.load(turn + d[:, None] * P + e[None, :]), input_precision="tf32x3")
    if mean is not None:
        sums += total[:, None] * tl.load(mean + line % H * D + e, mask=e < D, other=0.0)[None, :]
    share = tl.exp2(_level(lse, line, SPLITS, r, R, SPLITS) - top)
    total += share
    here = (r < R)[:, None] & (e < D)[None, :]
    sums += share[:, None] * tl.load(at + SPLITS * (R * D) + e[None, :], mask=here, other=0.0)
    some = tl.where(total > 0, total, 1.0)
    to = out + (line * R + r)[:, None] * D + e[None, :]
    tl.store(to, (sums / some[:, None]).to(out.dtype.element_ty), mask=here)
    if tl.program_id(1) == 0:
        tl.store(level + line * R + r, tl.where(total > 0, top + tl.log2(some), float("-inf")), mask=r < R)


@triton.jit
def _level(lse, line, split, r, R: tl.constexpr, SPLITS: tl.constexpr):
    return tl.load(lse + (line * (SPLITS + 1) + split) * R + r, mask=r < R, other=float("-inf"))
