"""Attend by one token to bfloat16 keys and values, which the packed kernels are compared with, shape by shape.

flash, cudnn, efficient          PyTorch's scaled_dot_product_attention, each of its backends, with enable_gqa
flash rows, cudnn rows, ...      the same, the query heads of a KV head as rows of one query: it may be faster
pages                            an ordinary Triton kernel over pages of 16 tokens
flash-attn, flash-attn pages     flash_attn_with_kvcache, contiguous and in pages of 256, where it is installed
flashinfer                       BatchDecodeWithPagedKVCacheWrapper over pages of 16, where it is installed

A backend that does not take a shape, or this device, is listed with what it said. PyTorch's math backend is left out:
it copies keys and values for every query head.
"""

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cases import Case, queries
from benchmarks.clock import Timing, timed

Call = Callable[[], Any]
SDPA = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
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


def attend_pages(q_BHTD: Tensor, k_pages: Tensor, v_pages: Tensor, pages_BN: Tensor, tokens: int) -> Tensor:
    """The attention of one query token to `tokens` tokens of every row: [B, Hq, 1, D]. An ordinary split-K kernel.

    What a paged cache costs where no library for it is there. A page is PAGE tokens of all heads, as vLLM and
    FlashInfer lay it out; a row finds its pages in a table, in any order. Nothing is tuned for one device: tiles of 64
    tokens, 4 warps, 3 stages, about four programs on every multiprocessor.

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


def in_pages(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in pages, and the table, in which pages lie as they come after long use: at random."""
    count = case.tokens // PAGE
    shape = (case.batch * count, PAGE, case.model.kv_heads, case.model.head_size)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(case.batch * count, device=device).to(torch.int32).view(case.batch, count)
    return k, v, table


def paged_step(case: Case, device: torch.device) -> Call:
    """The decode step over random pages."""
    held, q = in_pages(case, device), queries(case, device)
    return lambda: attend_pages(q, *held, case.tokens)


def sdpa(case: Case, device: torch.device) -> Iterator[tuple[str, Call]]:
    """PyTorch's backends, in both forms."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = case.model
    shape = (case.batch, model.kv_heads, case.tokens, model.head_size)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = queries(case, device)
    rows = q.view(case.batch, model.kv_heads, -1, model.head_size)
    for name, backend in SDPA.items():
        for form, query, settings in ((name, q, {"enable_gqa": True}), (f"{name} rows", rows, {})):

            def call(query: Tensor = query, settings: dict = settings, backend: str = backend) -> Tensor:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    return torch.nn.functional.scaled_dot_product_attention(query, k, v, **settings)

            yield form, call


def flash_attn(case: Case, device: torch.device) -> Iterator[tuple[str, Call]]:
    """FlashAttention 3, or 2, if installed."""
    module = next((name for name in ("flash_attn_interface", "flash_attn") if find_spec(name)), None)
    if module is None:
        return
    attend = getattr(__import__(module), "flash_attn_with_kvcache")  # noqa: B009
    k, v, table = in_pages(case, device)
    whole = [x.view(case.batch, case.tokens, *x.shape[2:]) for x in (k, v)]
    pages = [x.view(-1, 256, *x.shape[2:]) for x in (k, v)]
    q = queries(case, device).transpose(1, 2)
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    table = torch.randperm(len(pages[0]), device=device).to(torch.int32).view(case.batch, -1)
    named = "page_table" if module == "flash_attn_interface" else "block_table"
    yield "flash-attn", lambda: attend(q, *whole, cache_seqlens=lengths)
    yield "flash-attn pages", lambda: attend(q, *pages, cache_seqlens=lengths, **{named: table})


def flashinfer(case: Case, device: torch.device) -> Iterator[tuple[str, Call]]:
    """FlashInfer's paged decode, if installed; its plan is made before, as a server makes it once a step."""
    if not find_spec("flashinfer"):
        return
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

    model = case.model
    k, v, table = in_pages(case, device)
    count = table.shape[1]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * count
    full = torch.full((case.batch,), PAGE, dtype=torch.int32, device=device)
    wrapper = Wrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=table.flatten().clone(),
        paged_kv_last_page_len_buffer=full.clone(),
    )  # fmt: skip
    wrapper.plan(
        starts, table.flatten(), full, model.q_heads, model.kv_heads, model.head_size, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = queries(case, device).squeeze(2)
    yield "flashinfer", lambda: wrapper.run(q, (k, v))


def pages(case: Case, device: torch.device) -> Iterator[tuple[str, Call]]:
    """The plain kernel over pages."""
    yield "pages", paged_step(case, device)


FOUND: tuple[Callable[[Case, torch.device], Iterator[tuple[str, Call]]], ...] = (sdpa, pages, flash_attn, flashinfer)


def measured(case: Case, device: torch.device, time: Callable[[Call], Timing] = timed) -> dict[str, Any]:
    """Each baseline's time, or why it has none; the tensors of one are gone before the next are made."""
    found: dict[str, Any] = {}
    for make in FOUND:
        try:
            for name, call in make(case, device):
                with warnings.catch_warnings(action="ignore"):  # of each reason for a refusal; the error says so too
                    try:
                        found[name] = time(call)
                    except Exception as error:  # torch's, a library's, out of memory
                        found[name] = f"{type(error).__name__}: {error}"[:120]
        except Exception as error:  # not even made: an installed library of another version
            found[make.__name__] = f"{type(error).__name__}: {error}"[:120]
        call = None  # which holds the tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def fastest(found: dict[str, Any]) -> tuple[str, Timing] | None:
    """(name, time) of the fastest that ran."""
    ran = [(timing.median, name) for name, timing in found.items() if isinstance(timing, Timing)]
    return (min(ran)[1], found[min(ran)[1]]) if ran else None
