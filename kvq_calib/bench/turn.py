"""Let a model generate with one cache, as a user does, and return the time of each token and the bytes of the cache."""

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvq_calib.bench.contenders import Contender
from kvq_calib.run.device import give_memory_back
from kvq_runtime.hf import CudaGraphs, KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.store.storage import storage_bytes

WARM = 2  # steps before those that are timed: in the first a graph is recorded, and memory is taken
FULL = "out of memory"
PROCESS = Path("/proc/self")
RESET = "5"  # sets this process' peak to what it has now; Source: Linux, Documentation/filesystems/proc.rst, clear_refs


@dataclass(frozen=True)
class Turn:
    """The times and bytes of one cache with one batch of prompts.

    first_s       seconds from the call until the first token of each row is at hand: the prompt's time
    steps_s       seconds of each later token, without the first WARM
    cache_bytes   in memory at the end, `shared_bytes` of them held once by all caches of the recipe
    peak_bytes    most memory in use during it, weights included; None if the system cannot report it
    graphs        what `CudaGraphs` replayed; "" where there were none
    error         the reason for having no figures; "" if it has some
    """

    first_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    shared_bytes: int = 0
    peak_bytes: int | None = None
    graphs: str = ""
    error: str = ""


class Stopwatch(BaseStreamer):
    """Note when tokens are at hand: `generate` gives it the prompt, then a token of each row, moved to the host."""

    def __init__(self):
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


def attempt(model: PreTrainedModel, contender: Contender, ids_BT: Tensor, tokens: int) -> Turn:
    """`take`, or the error that it ended in: memory that is not there, or what another library refuses."""
    try:
        return take(model, contender, ids_BT, tokens)
    except Exception as error:  # types vary by library; the other caches are worth measuring
        if out_of_memory(error):
            return Turn(error=FULL)
        return Turn(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300])
    finally:
        gc.collect()  # caches hold circles
        if ids_BT.device.type == "cuda":
            torch.cuda.empty_cache()


def take(model: PreTrainedModel, contender: Contender, ids_BT: Tensor, tokens: int) -> Turn:
    """Read prompts, int64 [rows, tokens], and generate greedily: one token, WARM, and those that are timed.

    The model has no end-of-text token, so that every row goes on to the end.
    """
    model.set_attn_implementation(contender.attention)
    cache, watch = contender.make(model), Stopwatch()
    most = watch_peak(ids_BT.device)
    # on a GPU, ours with its steps as CUDA graphs: how it is meant to be used there
    ours = ids_BT.device.type == "cuda" and isinstance(cache, KVQCache)
    with CudaGraphs(model) if ours else nullcontext() as graphs:
        began = time.perf_counter()
        model.generate(  # type: ignore[operator]
            ids_BT, attention_mask=torch.ones_like(ids_BT), **{CACHE: cache}, do_sample=False, streamer=watch,
            max_new_tokens=1 + WARM + tokens,
        )  # fmt: skip
    first, *later = watch.at[1:]
    marks = [first, *later][WARM:]
    return Turn(
        first_s=first - began,
        steps_s=[b - a for a, b in pairwise(marks)],
        cache_bytes=held(cache),
        shared_bytes=cache.memory_report().shared_bytes if isinstance(cache, KVQCache) else 0,
        peak_bytes=most(),
        graphs="" if graphs is None else repr(graphs).removeprefix("CudaGraphs(").removesuffix(")"),
    )


def held(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds, as allocated, each storage once."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return storage_bytes(tensor for layer in cache.layers for tensor in _tensors(vars(layer)))


def _tensors(found: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; in place of those that are made of others, these."""
    if isinstance(found, Tensor) and is_traceable_wrapper_subclass(found):
        for name in found.__tensor_flatten__()[0]:
            yield from _tensors(getattr(found, name))
    elif isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


def out_of_memory(error: BaseException) -> bool:
    """True if the error is that a device or the machine has no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # of PyTorch on a CPU


def watch_peak(device: torch.device) -> Callable[[], int | None]:
    """Start a measurement of peak memory; return a function to call at its end.

    It returns the most bytes in use, weights included, on a CPU those of the whole process; None if the system does not
    count them. Memory that earlier caches freed and the allocator keeps is released first.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        give_memory_back()
        try:
            (PROCESS / "clear_refs").write_text(RESET)
            return _of_process
        except OSError:  # no Linux, or not allowed
            pass
    return lambda: None


def _of_process() -> int | None:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", (PROCESS / "status").read_text(), re.M)
    return 1024 * int(found[1]) if found else None
