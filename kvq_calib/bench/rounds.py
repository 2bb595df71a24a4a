"""Measure caches in turns: in each round every cache reads the same prompts and generates, and another one begins.

In a turn a model generates with one cache, as a user does: the time of each token is taken, and the cache's bytes.
Whatever else the machine does falls on all alike, so that ratios within a run hold on a busy machine too. Processor
seconds stand beside the wall time: on a busy machine they grow less. One cache is in memory at a time.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvq_calib.bench.contenders import Contender
from kvq_calib.evaluate.record import load_model
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.plan import environment
from kvq_runtime.hf import CudaGraphs, KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.ops import product
from kvq_runtime.store.storage import storage_bytes

Progress = Callable[[int], object]
CONTEXTS = (1024, 4096)
WARM = 2  # steps before those that are timed: in the first a graph is recorded, and memory is taken
FULL = "out of memory"


@dataclass(frozen=True)
class Turn:
    """The times and bytes of one cache with one batch of prompts.

    first_s       seconds from the call until the first token of each row is at hand: the prompt's time
    steps_s       seconds of each later token, without the first WARM
    processor_s   seconds of all of the process's threads, a token of those
    cache_bytes   in memory at the end, `shared_bytes` of them held once by all caches of the recipe
    peak_bytes    most memory in use during it on a GPU, weights included; None on a CPU
    graphs        what `CudaGraphs` replayed; "" where there were none
    error         the reason for having no figures; "" if it has some
    """

    first_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    processor_s: float = 0.0
    cache_bytes: int = 0
    shared_bytes: int = 0
    peak_bytes: int | None = None
    graphs: str = ""
    error: str = ""


class Stopwatch(BaseStreamer):
    """Note when tokens are at hand: `generate` gives it the prompt, then a token of each row, moved to the host."""

    def __init__(self):
        self.at: list[float] = []
        self.processor: list[float] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.processor.append(time.process_time())

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
    cuda = ids_BT.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(ids_BT.device)
    # on a GPU, ours with its steps as CUDA graphs: how it is meant to be used there
    with CudaGraphs(model) if cuda and isinstance(cache, KVQCache) else nullcontext() as graphs:
        began = time.perf_counter()
        model.generate(  # type: ignore[operator]
            ids_BT, attention_mask=torch.ones_like(ids_BT), **{CACHE: cache}, do_sample=False, streamer=watch,
            max_new_tokens=1 + WARM + tokens,
        )  # fmt: skip
    marks, processor = watch.at[1 + WARM :], watch.processor[1 + WARM :]
    return Turn(
        first_s=watch.at[1] - began,
        steps_s=[b - a for a, b in pairwise(marks)],
        processor_s=(processor[-1] - processor[0]) / max(1, len(processor) - 1),
        cache_bytes=held(cache),
        shared_bytes=cache.memory_report().shared_bytes if isinstance(cache, KVQCache) else 0,
        peak_bytes=torch.cuda.max_memory_allocated(ids_BT.device) if cuda else None,
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


@dataclass(frozen=True)
class Plan:
    """The prompts to measure: of each length, in batches of each size.

    tokens   of a row whose time counts, in each round
    """

    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = (1,)
    tokens: int = 32
    rounds: int = 3
    seed: int = 0

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(context, batch), the smaller first."""
        return list(itertools.product(sorted(set(self.contexts)), sorted(set(self.batches))))

    def longest(self, context: int) -> int:
        """Tokens of a row at the end."""
        return context + 1 + WARM + self.tokens

    def check(self, files: ModelFiles) -> "Plan":
        """The plan itself. ValueError if a prompt with what is generated is longer than the model was made for."""
        longest = max(self.contexts)
        if self.longest(longest) > files.context:
            rest = self.longest(0)
            raise ValueError(
                f"context {longest} and {rest} generated tokens; {files.id} was made for at most {files.context}: use "
                f"--context up to {files.context - rest}"
            )
        return self


@dataclass(frozen=True)
class Round:
    """One turn of each cache, by name."""

    context: int
    batch: int
    turns: Mapping[str, Turn]


def dtype_of(files: ModelFiles, name: str | None = None, device: str = "cpu") -> torch.dtype:
    """Return the dtype of this name; None: the stored one, and bfloat16 if that has 32 bits.

    On a processor without bfloat16 instructions, where bfloat16 takes up to 170 times as long, None means float32.
    """
    if name is not None:
        return getattr(torch, name)
    if product.without_bfloat16(device):
        return torch.float32
    return torch.bfloat16 if files.dtype == torch.float32 else files.dtype


def load(files: ModelFiles, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model, without an end of text: what is generated goes on for as long as it is asked for."""
    model = load_model(files, device, dtype)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def about(files: ModelFiles, model: PreTrainedModel, contenders: Sequence[Contender], plan: Plan) -> dict[str, Any]:
    """All that the figures depend on beside context and batch."""
    kind = str(model.dtype).removeprefix("torch.")
    return {
        "model": files.about,
        "weights_bytes": sum(x.nbytes for x in model.parameters()),
        "tokens": plan.tokens,
        "seed": plan.seed,
        "caches": [contender.name for contender in contenders],
        "environment": environment(str(model.device), kind, torch.get_num_threads()),
    }


def measure(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    plan: Plan,
    done: list[Round],
    progress: Progress = lambda tokens: None,
) -> None:
    """Measure all rounds, and append each to `done`. `progress` gets the number of `work(...)` tokens done."""
    for context, batch in plan.cells:
        ids_BT = prompts(model, context, batch, plan.seed)
        failed: dict[str, Turn] = {}

        def turn(one: Contender, tokens: int, ids_BT: Tensor = ids_BT, failed: dict[str, Turn] = failed) -> Turn:
            found = failed.get(one.name) or attempt(model, one, ids_BT, tokens)
            if found.error:
                failed[one.name] = found
            progress(ids_BT.numel())
            return found

        for one in contenders:  # which warms kernels and memory up, and does not count
            turn(one, 1)
        for number in range(plan.rounds):
            first = number % len(contenders)
            turns = {one.name: turn(one, plan.tokens) for one in (*contenders[first:], *contenders[:first])}
            done.append(Round(context, batch, turns))


def work(contenders: int, plan: Plan) -> int:
    """Return the tokens that `measure` reports to `progress`, in all."""
    return (plan.rounds + 1) * contenders * sum(context * batch for context, batch in plan.cells)


def prompts(model: PreTrainedModel, context: int, batch: int, seed: int) -> Tensor:
    """Random token ids, int64 [rows, tokens]: no row is like another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(tokens, (batch, context), generator=generator).to(model.device)
