"""Take in a prompt and generate, step by step or as a CUDA graph, and say how long it took."""

import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from benchmarks.caches import Way, held, random_model, repeat
from benchmarks.clock import captured, unsynchronized
from benchmarks.lines import Line
from kvq_runtime.hf import KVQCache

NEW = 128  # tokens generated, as many as a block has
WARM = 2  # steps before those that are timed
SPARE = 8  # tokens that a buffer has room for beyond what is timed
Step = Callable[[], torch.Tensor]


class Marks:
    """Moments between steps: of the device's own clock on a GPU, which the host need not wait for."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def set(self) -> None:
        if not self.gpu:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def milliseconds(self) -> list[float]:
        """From each mark to the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in pairs]
        return [1e3 * (b - a) for a, b in pairs]


@torch.inference_mode()
def generate(model: PreTrainedModel, way: Way, batch: int, prompt: int, new: int) -> Line:
    """Take in a prompt, generate `new` tokens in each of `batch` rows, and say how it went."""
    device = next(model.parameters()).device
    model.set_attn_implementation(way.attention)
    cache = way.make(model, prompt + new + SPARE)
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, prompt), device=device, generator=generator)
    whole = Marks(device)
    whole.set()
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    whole.set()
    repeat(cache, batch)
    token = logits[:, -1:].argmax(-1).expand(batch, 1).clone()
    place = torch.full((batch, 1), prompt, device=device)

    def step() -> torch.Tensor:
        out = model(token, position_ids=place, past_key_values=cache, logits_to_keep=1).logits
        return out[:, -1:].argmax(-1)

    for _ in range(WARM):
        token.copy_(step())
        place += 1
    forward = recorded(cache, step, token, place) if way.graph else step
    marks = Marks(device)
    marks.set()
    for _ in range(new):
        token.copy_(forward())
        place += 1
        marks.set()
    took = marks.milliseconds()
    low, median, high = quantiles(took, n=4, method="inclusive")
    return {
        "tokens_per_s": round(1e3 * batch * new / sum(took), 2),
        "ms_per_step": round(median, 3),
        "low_ms": round(low, 3),
        "high_ms": round(high, 3),
        "worst_ms": round(max(took), 3),
        "prompt_s": round(whole.milliseconds()[0] / 1e3, 3),
        "cache_bytes": held(cache),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


@torch.inference_mode()
def warm(model: PreTrainedModel, prompt: int) -> None:
    """Take in a prompt that is forgotten: the first pass of a model loads its kernels."""
    ids = torch.zeros(1, prompt, dtype=torch.long, device=next(model.parameters()).device)
    model(ids, use_cache=False, logits_to_keep=1)


def recorded(cache: Cache, step: Step, token: torch.Tensor, place: torch.Tensor) -> Step:
    """The step as a CUDA graph; of ours eager steps come first, until the next can be recorded."""
    if isinstance(cache, KVQCache):
        from kvq_runtime.attention import cuda_graph

        while cuda_graph.not_yet(cache.blocks):
            token.copy_(step())
            place += 1
        return cuda_graph.captured(cache.blocks, step)
    with unsynchronized():
        token.copy_(step())
    place += 1
    out, replay = captured(step)

    def again() -> torch.Tensor:
        replay()
        return out

    return again


def rehearse(name: str, recipe: str, batch: int, prompt: int, device: torch.device) -> None:
    """Launch what generation with a recipe launches, with one small layer of the same heads."""
    small = {"num_hidden_layers": 1, "vocab_size": 1024, "intermediate_size": 256}
    generate(random_model(name, device, **small), Way(recipe, "kvq", False), batch, prompt, NEW + SPARE)
