"""Time caches in turns: in each round every cache reads the same prompts and generates, and another one begins.

Whatever else the machine does falls on all alike, more or less: of wall times on a busy machine little is left, while
processor seconds change little. The share of the processors that other processes took says which to read. One cache is
in memory at a time.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache
from transformers.generation.streamers import BaseStreamer

from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.record import load_model
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.device import cores
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.cuda_graphs import CudaGraphs
from kvq_runtime.hf.model import CACHE
from kvq_runtime.ops import product
from kvq_runtime.store.storage import storage_bytes

QUANTIZED = ("quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit")  # transformers' own
AXES = {"quanto": 0, "hqq": 1}  # of the groups that each backend is used with
BUSY = 0.1  # share of the processors: beyond it wall times mean little
WARM = 2  # steps before those that are timed: in the first a graph is recorded, and memory is taken

Make = Callable[[PreTrainedModel], Cache]  # an empty cache for a model


@dataclass(frozen=True)
class Plan:
    """Prompts of each length, in batches of each size; `tokens` are timed in each row and round."""

    contexts: tuple[int, ...] = (1024,)
    batches: tuple[int, ...] = (1,)
    tokens: int = 32
    rounds: int = 3
    seed: int = 0

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(context, batch), the smaller first."""
        return list(itertools.product(sorted(set(self.contexts)), sorted(set(self.batches))))

    def check(self, files: ModelFiles) -> "Plan":
        """Return the plan; ValueError if a prompt with its continuation is longer than the model was made for."""
        longest, most = max(self.contexts), files.context - (1 + WARM + self.tokens)
        if longest > most:
            raise ValueError(f"context {longest}; {files.id} takes {files.context} tokens in all: use at most {most}")
        return self


@dataclass(frozen=True)
class Turn:
    """The times and bytes of one cache with one batch of prompts.

    first_s      seconds from the call until the first token of each row: the prompt's time
    steps_s      seconds of each later token, without the first WARM
    peak_bytes   most memory in use on a GPU, weights included; None on a CPU
    error        the reason for having no figures; "" if it has some
    ..._cpu_s    processor seconds of this process, all threads, in the place of seconds
    busy         share of the processors that other processes took meanwhile, 0 to 1
    """

    first_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    peak_bytes: int | None = None
    error: str = ""
    first_cpu_s: float = 0.0
    steps_cpu_s: list[float] = field(default_factory=list)
    busy: float = 0.0


class Stopwatch(BaseStreamer):
    """Note when tokens arrive: `generate` gives it the prompt, then a token of each row, moved to the host.

    at, cpu_at   seconds, and processor seconds, with the start first; `others`: of other processes since the start
    """

    def __init__(self):
        self.at: list[float] = []
        self.cpu_at: list[float] = []
        self._before, self.others = busy_seconds(), 0.0
        self.put(None)

    def put(self, value: Tensor | None) -> None:
        self.at.append(time.perf_counter())
        self.cpu_at.append(time.process_time())

    def end(self) -> None:
        """Note what others took."""
        self.others = max(0.0, busy_seconds() - self._before - (time.process_time() - self.cpu_at[0]))


def busy_seconds() -> float:
    """Return the seconds that the processors which this process may use have worked, for whatever process."""
    own, every = psutil.Process(), psutil.cpu_times(percpu=True)
    allowed = own.cpu_affinity() if hasattr(own, "cpu_affinity") else range(len(every))
    return sum(each.user + each.system + getattr(each, "nice", 0.0) + getattr(each, "steal", 0.0)
               for number, each in enumerate(every) if number in allowed)  # fmt: skip


def measure(
    model: PreTrainedModel, contenders: Mapping[str, Make], plan: Plan, progress: Callable[[int], object]
) -> list[dict[str, Any]]:
    """Measure all rounds; return a row of figures for each cache at each context and batch.

    progress   gets the number of tokens done, `work(...)` in all
    """
    rows = []
    for context, batch in plan.cells:
        ids_BT = prompts(model, context, batch, plan.seed)
        turns: dict[str, list[Turn]] = {name: [] for name in contenders}
        for number in range(plan.rounds + 1):
            names, first = list(contenders), number % len(contenders)
            for name in (*names[first:], *names[:first]):
                own = turns[name]
                if not own or not own[-1].error:
                    own.append(attempt(model, contenders[name], ids_BT, plan.tokens if number else 1))
                progress(ids_BT.numel())
        rows += figures(context, batch, turns)
    return rows


def work(contenders: int, plan: Plan) -> int:
    """Return the tokens that `measure` reports to `progress`, in all."""
    return (plan.rounds + 1) * contenders * sum(context * batch for context, batch in plan.cells)


def attempt(model: PreTrainedModel, make: Make, ids_BT: Tensor, tokens: int) -> Turn:
    """Take a turn, or return the error that it ended in, such as a lack of memory."""
    try:
        return take(model, make, ids_BT, tokens)
    except Exception as error:  # types vary by library; the other caches are worth measuring
        return Turn(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300])
    finally:
        gc.collect()  # caches hold circles
        if ids_BT.device.type == "cuda":
            torch.cuda.empty_cache()


def take(model: PreTrainedModel, make: Make, ids_BT: Tensor, tokens: int) -> Turn:
    """Read prompts, int64 [rows, tokens], and generate greedily: one token, WARM, and the timed ones.

    The model has no end-of-text token, so that every row goes on to the end. On a GPU our caches replay their steps as
    CUDA graphs.
    """
    cache, cuda = make(model), ids_BT.device.type == "cuda"
    model.set_attn_implementation("kvq" if isinstance(cache, KVQCache) else "sdpa")
    if cuda:
        torch.cuda.reset_peak_memory_stats(ids_BT.device)
    with CudaGraphs(model) if cuda and isinstance(cache, KVQCache) else nullcontext():
        watch = Stopwatch()
        model.generate(  # type: ignore[operator]
            ids_BT, attention_mask=torch.ones_like(ids_BT), **{CACHE: cache}, do_sample=False, streamer=watch,
            max_new_tokens=1 + WARM + tokens,
        )  # fmt: skip
    return Turn(
        first_s=watch.at[2] - watch.at[0],
        steps_s=[b - a for a, b in pairwise(watch.at[2 + WARM :])],
        first_cpu_s=watch.cpu_at[2] - watch.cpu_at[0],
        steps_cpu_s=[b - a for a, b in pairwise(watch.cpu_at[2 + WARM :])],
        busy=watch.others / (watch.at[-1] - watch.at[0]) / cores(),
        cache_bytes=cache_bytes(cache),
        peak_bytes=torch.cuda.max_memory_allocated(ids_BT.device) if cuda else None,
    )


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of all tensors that a cache holds, as allocated, each storage once."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return storage_bytes(tensor for layer in cache.layers for tensor in _tensors(vars(layer)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers; the parts of a wrapper subclass in place of it."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def figures(context: int, batch: int, turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, Any]]:
    """Return a row a cache: medians over the rounds after the first, which warms up, and ratios to the first cache."""
    rows: list[dict[str, Any]] = []
    for name, own in turns.items():
        row: dict[str, Any] = {"context": context, "batch": batch, "cache": name}
        last, timed = own[-1], own[1:]
        if last.error:
            rows.append(row | {"error": last.error})
            continue
        low, middle, high = np.quantile([step for turn in timed for step in turn.steps_s], (0.25, 0.5, 0.75)).tolist()
        row |= {"first_token_s": float(np.median([turn.first_s for turn in timed])), "tokens_per_s": batch / middle}
        row |= {"quartiles": [batch / high, batch / low]}
        cpu_s = [step for turn in timed for step in turn.steps_cpu_s]
        row |= {
            "first_cpu_s": float(np.median([turn.first_cpu_s for turn in timed])),
            "step_cpu_s": float(np.median(cpu_s)),
        }
        row |= {"busy": float(np.mean([turn.busy for turn in timed])), "cache_bytes": last.cache_bytes}
        row |= {"peak_bytes": last.peak_bytes} if last.peak_bytes is not None else {}
        base = rows[0] if rows else row
        for figure in ("tokens_per_s", "step_cpu_s", "cache_bytes"):
            row |= {f"{figure}_ratio": row[figure] / base[figure]} if base.get(figure) else {}
        rows.append(row)
    return rows


def load(files: ModelFiles, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model without an end of text, so that it generates as many tokens as it is asked for."""
    model = load_model(files, device, dtype)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def dtype_of(files: ModelFiles, name: str | None = None, device: str = "cpu") -> torch.dtype:
    """Return the dtype of this name; None: the stored one, bfloat16 for float32, float32 where that is slow."""
    if name is not None:
        return getattr(torch, name)
    if product.without_bfloat16(device):
        return torch.float32
    return torch.bfloat16 if files.dtype == torch.float32 else files.dtype


def prompts(model: PreTrainedModel, context: int, batch: int, seed: int) -> Tensor:
    """Draw token ids, int64 [rows, tokens]: no row is like another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(tokens, (batch, context), generator=generator).to(model.device)


# ---- caches ----------------------------------------------------------------------------------------------------------


def uncompressed(dtype: torch.dtype) -> dict[str, Make]:
    """Return the cache that all are compared with: keys and values in the model's dtype."""
    return {f"{8 * dtype.itemsize} bit": lambda model: DynamicCache(config=model.config)}


def quantized(name: str) -> dict[str, Make]:
    """Return one of transformers' quantized caches, with its default groups and recent tokens."""
    if name not in QUANTIZED:
        raise ValueError(f"--beside {name!r:.80}; use {', '.join(QUANTIZED)}, or none")
    backend, _, bits = name.removesuffix("bit").partition("-")
    settings = {"nbits": int(bits), "axis_key": AXES[backend], "axis_value": AXES[backend]}
    return {name: lambda model: QuantizedCache(backend, config=model.config, **settings)}


def compressed(text: str, files: ModelFiles, registry: str | None = None) -> dict[str, Make]:
    """Return the cache of an unfitted recipe or an artifact, found as by `kvq eval`."""
    candidate = find(text, files, registry)
    recipe = candidate.recipe.check(files.geometry)
    return {candidate.name: lambda model: KVQCache(recipe, model, candidate.tensors or None)}
