"""What the packed kernels are compared with: attention of one token to bfloat16 keys and values of the same shape.

flash, cudnn, efficient          PyTorch's scaled_dot_product_attention, each of its backends, with enable_gqa
flash rows, cudnn rows, ...      the same, the query heads of a KV head as rows of one query: it may be faster
pages                            paged.py, an ordinary Triton kernel over pages of 16 tokens
flash-attn, flash-attn pages     flash_attn_with_kvcache, contiguous and in pages of 256, where it is installed
flashinfer                       BatchDecodeWithPagedKVCacheWrapper over pages of 16, where it is installed

A backend that does not take a shape, or this device, is listed with what it said. PyTorch's math backend is left out:
it copies keys and values for every query head.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import paged
from benchmarks.cases import Case, queries
from benchmarks.clock import Timing, timed

Call = Callable[[], Any]
SDPA = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


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
    k, v, table = paged.pages(case, device)
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
    k, v, table = paged.pages(case, device)
    count = table.shape[1]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * count
    full = torch.full((case.batch,), paged.PAGE, dtype=torch.int32, device=device)
    wrapper = Wrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=table.flatten().clone(),
        paged_kv_last_page_len_buffer=full.clone(),
    )  # fmt: skip
    wrapper.plan(
        starts, table.flatten(), full, model.q_heads, model.kv_heads, model.head_size, paged.PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = queries(case, device).squeeze(2)
    yield "flashinfer", lambda: wrapper.run(q, (k, v))


def pages(case: Case, device: torch.device) -> Iterator[tuple[str, Call]]:
    """The plain kernel over pages."""
    yield "pages", paged.built(case, device)


FOUND: tuple[Callable[[Case, torch.device], Iterator[tuple[str, Call]]], ...] = (sdpa, pages, flash_attn, flashinfer)


def measured(case: Case, device: torch.device, time: Callable[[Call], Timing] = timed) -> dict[str, Any]:
    """Each baseline's time, or why it has none; the tensors of one are gone before the next are made."""
    found: dict[str, Any] = {}
    for make in FOUND:
        try:
            for name, call in make(case, device):
                with quiet():
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


@contextmanager
def quiet() -> Iterator[None]:
    """Backends that refuse a shape warn of each reason; the error says so too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
