"""Attend to bfloat16 pages with an ordinary split-K kernel: what a paged cache costs where no library for it is there.

A page is 16 tokens of all heads, [PAGE, H, D], as vLLM and FlashInfer lay it out; a row finds its pages in a table, in
any order. Nothing is tuned for one device: tiles of 64 tokens, 4 warps, 3 stages, about four programs on every
multiprocessor.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cases import Case, queries

PAGE = 16  # tokens
LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    p_q, p_k, p_v, p_pages, p_part, p_lse, scale, tokens, row_pages, splits,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program per (batch row, KV head) and split: its mean of the values, and log2 Σ 2^s, of G query heads."""
    i_bh, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    o_m, o_d = tl.arange(0, M), tl.arange(0, D)
    m_m = o_m < G
    b_q = tl.load(p_q + (i_bh * G + o_m)[None, :] * D + o_d[:, None], mask=m_m[None, :], other=0.0)
    b_top, b_total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    b_sums = tl.zeros((D, M), tl.float32)
    each = tl.cdiv(tl.cdiv(tokens, N), splits) * N
    last = tl.minimum((i_split + 1) * each, tokens)
    for i in range(i_split * each, last, N):
        o_t = i + tl.arange(0, N)
        m_t = o_t < last
        b_page = tl.load(p_pages + i_b * row_pages + o_t // PAGE, mask=m_t, other=0).to(tl.int64)
        o_x = ((b_page * PAGE + o_t % PAGE) * H + i_h)[:, None] * D + o_d[None, :]
        b_k = tl.load(p_k + o_x, mask=m_t[:, None], other=0.0)
        b_v = tl.load(p_v + o_x, mask=m_t[:, None], other=0.0)
        b_s = tl.where(m_t[:, None], tl.dot(b_k, b_q) * scale, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 0))
        b_p, b_old = tl.exp2(b_s - b_new[None, :]), tl.exp2(b_top - b_new)
        b_total = b_total * b_old + tl.sum(b_p, 0)
        b_sums = b_sums * b_old[None, :] + tl.dot(tl.trans(b_v), b_p.to(b_v.dtype))
        b_top = b_new
    b_some = tl.where(b_total > 0, b_total, 1.0)
    i_part = (i_bh * splits + i_split) * G
    tl.store(p_part + (i_part + o_m)[None, :] * D + o_d[:, None], b_sums / b_some[None, :], mask=m_m[None, :])
    tl.store(p_lse + i_part + o_m, tl.where(b_total > 0, b_top + tl.log2(b_some), float("-inf")), mask=m_m)


@triton.jit
def _merge(p_part, p_lse, p_out, splits, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    """One program per query head: the mean of the splits' means, weighed by their 2^lse."""
    i_bh, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_d = tl.arange(0, S), tl.arange(0, D)
    i_row = (i_bh * splits + o_s) * G + i_g
    b_lse = tl.load(p_lse + i_row, mask=o_s < splits, other=float("-inf"))
    b_w = tl.exp2(b_lse - tl.max(b_lse, 0))
    b_part = tl.load(p_part + i_row[:, None] * D + o_d[None, :], mask=(o_s < splits)[:, None], other=0.0)
    b_out = tl.sum(b_w[:, None] * b_part, 0) / tl.sum(b_w, 0)
    tl.store(p_out + (i_bh * G + i_g) * D + o_d, b_out.to(p_out.dtype.element_ty))


def attend(q_BHTD: Tensor, k_pages: Tensor, v_pages: Tensor, pages_BN: Tensor, tokens: int) -> Tensor:
    """The attention of one query token to `tokens` tokens of every row: [B, Hq, 1, D].

    k_pages, v_pages   [pages, PAGE, H, D], D a power of two
    pages_BN           int32, which page has a row's tokens PAGE · n to PAGE · n + 15
    """
    batch, q_heads, _, size = q_BHTD.shape
    heads = k_pages.shape[2]
    ratio, device = q_heads // heads, q_BHTD.device
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    splits = max(1, min(64, 4 * count // (batch * heads)))
    part = torch.empty(batch * heads, splits, ratio, size, dtype=torch.float32, device=device)
    lse, out = part.new_empty(part.shape[:3]), torch.empty_like(q_BHTD)
    _attend[(batch * heads, splits)](
        q_BHTD, k_pages, v_pages, pages_BN, part, lse, size**-0.5 * LOG2E, tokens, pages_BN.shape[1], splits,
        heads, ratio, max(8, triton.next_power_of_2(ratio)), size, PAGE, 64, num_warps=4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    _merge[(batch * heads, ratio)](
        part, lse, out, splits, ratio, size, triton.next_power_of_2(splits), num_warps=4, enable_fp_fusion=True
    )
    return out


def pages(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in pages, and the table, in which pages lie as they come after long use: at random."""
    count = case.tokens // PAGE
    shape = (case.batch * count, PAGE, case.model.kv_heads, case.model.head_size)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(case.batch * count, device=device).to(torch.int32).view(case.batch, count)
    return k, v, table


def built(case: Case, device: torch.device) -> Callable[[], Any]:
    """The decode step over random pages."""
    held, q = pages(case, device), queries(case, device)
    return lambda: attend(q, *held, case.tokens)
