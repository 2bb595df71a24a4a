"""Log-sum-exp merge of the splits; what came from the blocks is rotated back, once, and the exact splits are added.

out = (Σ 2^(lse_i - top) · mean_i) / Σ 2^(lse_i - top); the blocks' part is multiplied with the rotation first.

A pass over the splits loads levels and means side by side: no load waits for another one's result. It takes as many
splits as there are, up to the last of CLASSES; where they are few a program is one warp, for of a large batch there are
thousands of programs. Each of CHUNK places sums up every CHUNK-th split by its own largest level so far; places are
added up at the end, once. Splits that no block came to are neither written nor read.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.attend.kernel import EXACT, PAGED_LENGTHS, share
from kvq_runtime.kernels.attend.layout import padded
from kvq_runtime.kernels.encode.tile import FUSED, on

LOADED = 1024  # elements of partial results that a warp loads at once
CLASSES = (16, 32, 64, 128)  # splits that a program takes at a time: as few as there are, at most the last
WARPS = 4  # of a program that rotates; of any other, at most
ROTATION = 16384  # elements of a rotation that it multiplies with at once, of all its rows
SHARED, SHARED_WIDE = 4, 128  # query rows that share a rotation, and channels that they may have then
ENOUGH = 132  # programs that are left then, at least: the multiprocessors of an H200


def merge_parts(
    part: Tensor,
    part_lse: Tensor,
    rotation: Tensor | None,
    mean: Tensor | None,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launch the merge: its arguments are the kernel's; `out` is [B, Hq, tokens, D]."""
    lines, parts, rows, size = part.shape
    splits = parts - EXACT.value
    wide, each, chunk, shared, warps = merged(size, splits, rotation is not None, lines * rows)
    with on(part):
        merge[(lines, triton.cdiv(rows, shared), triton.cdiv(size, wide))](
            part, part_lse, rotation, mean, lengths, out, lse, splits, rows,
            lines // len(out), size, wide, each, chunk, shared, int(lengths.ndim == 2),
            num_warps=warps, maxnreg=255, **FUSED,
        )  # fmt: skip


def merged(size: int, splits: int, rotates: bool, rows: int) -> tuple[int, int, int, int, int]:
    """(channels of a program, channels that it writes and splits that it takes at a time, its query rows, warps).

    A rotation needs all channels of a head, and is read for SHARED rows at once where programs enough are left. Splits
    of one of CLASSES share a merge, so that few are compiled.

    rows   of queries, of all batch rows and KV heads
    """
    wide, some = padded(size), next((count for count in CLASSES if splits <= count), CLASSES[-1])
    if rotates:
        shared = SHARED if rows >= SHARED * ENOUGH and wide <= SHARED_WIDE else 1
        return wide, min(wide, ROTATION // shared // wide), min(some, WARPS * LOADED // shared // wide), shared, WARPS
    wide = min(wide, 64 if some == CLASSES[0] else 32)
    return wide, wide, some, 1, max(1, some * wide // LOADED)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge(
    p_part, p_lse, p_rotation, p_mean, p_lengths, p_out, p_out_lse, splits, rows,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One program per (batch row, KV head), ROWS query rows and WIDE channels, CHUNK splits at a time.

    p_part, p_lse   float32 [B · H, EXACT + splits, rows, D] and [B · H, rows, EXACT + splits], as kernel.py writes them
    p_rotation      of the values: float16 [D, D], of Encoded, or None; not of the exact splits
    p_mean          of the values, float32 [H, D], or None; not of the exact splits
    p_lengths       int32 [3], the first: encoded blocks; PAGED: [B, 4], of each row
    p_out           [B · H, rows, D] in the queries' dtype
    p_out_lse       float32 [B · H, rows]
    rows            of queries, of each KV head; the last program of a head may have room for more
    WIDE            where there is a rotation D, padded to a power of two; else COLUMNS
    COLUMNS         channels that are rotated and written at a time
    """
    i_bh = tl.program_id(0).to(tl.int64)
    parts = EXACT + splits
    o_r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    p_lse += (i_bh * rows + o_r)[:, None] * parts
    p_part += (i_bh * parts * rows + o_r)[:, None, None] * D
    first = tl.program_id(2) * WIDE
    o_d, o_e = first + tl.arange(0, WIDE), tl.arange(0, EXACT)
    b_exact = tl.load(p_lse + o_e[None, :], mask=m_r[:, None], other=float("-inf"))
    if PAGED == 1:
        p_lengths += i_bh // H * PAGED_LENGTHS
    blocks = tl.load(p_lengths)
    used = tl.cdiv(blocks, share(splits, blocks))
    p_blocks = p_part + EXACT * rows * D + o_d[None, None, :]
    b_top, b_total, b_sums = _blocks(p_blocks, p_lse + EXACT, used, rows * D, m_r, o_d < D, CHUNK)
    b_higher = tl.maximum(tl.max(b_top, 1), tl.max(b_exact, 1))
    b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_fade, b_weights = tl.exp2(b_top - b_base[:, None]), tl.exp2(b_exact - b_base[:, None])
    b_blocks, b_mixed = tl.sum(b_total * b_fade, 1), tl.sum(b_sums * b_fade[:, :, None], 1)
    b_total = b_blocks + tl.sum(b_weights, 1)
    b_some = tl.where(b_total > 0, b_total, 1.0)
    for i in tl.static_range(WIDE // COLUMNS):
        o_c = first + i * COLUMNS + tl.arange(0, COLUMNS)
        m_c = o_c < D
        p = p_part + o_e[None, :, None].to(tl.int64) * rows * D + o_c[None, None, :]
        b_parts = tl.load(p, mask=m_r[:, None, None] & m_c[None, None, :], other=0.0)
        b_out = tl.sum(b_weights[:, :, None] * b_parts, 1)
        if p_rotation is None:
            b_out += b_mixed
        else:
            m = (o_d < D)[:, None] & m_c[None, :]
            b_back = tl.load(p_rotation + o_d[:, None] * D + o_c[None, :], mask=m, other=0.0).to(tl.float32)
            b_out += tl.sum(b_mixed[:, :, None] * b_back[None, :, :], 1)
        if p_mean is not None:
            b_mean = tl.load(p_mean + i_bh % H * D + o_c, mask=m_c, other=0.0)
            b_out += b_blocks[:, None] * b_mean[None, :]
        p = p_out + (i_bh * rows + o_r)[:, None] * D + o_c[None, :]
        tl.store(p, (b_out / b_some[:, None]).to(p_out.dtype.element_ty), mask=m_r[:, None] & m_c[None, :])
    if tl.program_id(2) == 0:
        level = tl.where(b_total > 0, b_base + tl.log2(b_some), float("-inf"))
        tl.store(p_out_lse + i_bh * rows + o_r, level, mask=m_r)


@triton.jit
def _blocks(p_part, p_lse, used, stride, m_r, m_d, CHUNK: tl.constexpr):
    """(top, Σ 2^(lse - top), Σ 2^(lse - top) · mean) of `used` splits, every CHUNK-th, of each query row: float32
    [rows, CHUNK], [rows, CHUNK] and [rows, CHUNK, channels].

    p_part, p_lse   of the first split, [rows, 1, channels] and [rows, 1]; means of the next one are `stride` elements
                    further
    m_r, m_d        which rows and channels there are
    """
    b_top = tl.full((m_r.shape[0], CHUNK), float("-inf"), tl.float32)
    b_total = tl.zeros((m_r.shape[0], CHUNK), tl.float32)
    b_sums = tl.zeros((m_r.shape[0], CHUNK, m_d.shape[0]), tl.float32)
    for i in range(0, used, CHUNK):
        o_s = i + tl.arange(0, CHUNK)
        m_rs = m_r[:, None] & (o_s < used)[None, :]
        b_level = tl.load(p_lse + o_s[None, :], mask=m_rs, other=float("-inf"))
        p = p_part + o_s[None, :, None].to(tl.int64) * stride
        b_mean = tl.load(p, mask=m_rs[:, :, None] & m_d[None, None, :], other=0.0)
        b_higher = tl.maximum(b_top, b_level)
        b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
        b_fade, b_weight = tl.exp2(b_top - b_base), tl.exp2(b_level - b_base)
        b_total = b_total * b_fade + b_weight
        b_sums = b_sums * b_fade[:, :, None] + b_weight[:, :, None] * b_mean
        b_top = b_higher
    return b_top, b_total, b_sums
