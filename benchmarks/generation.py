"""Generate with a model of random weights: time of a step and peak memory, kvq against 16-bit caches of transformers.

A prompt of one row of random tokens is taken in, in one pass; the cache is repeated for a batch; then 128 tokens are
generated greedily, one forward pass each, in which a block of every row is encoded once. Caches:

dynamic           DynamicCache, eager: it copies its history at every step
static            StaticCache, as a CUDA graph: masked attention over the whole buffer, as transformers does it
static unmasked   StaticCache, as a CUDA graph, without the mask: as fast as PyTorch's attention is over as many tokens.
                  The buffer has room for a few tokens that are not there yet, and attends to them: what it generates is
                  not to be used. It is the bar for a 16-bit cache
a recipe          KVQCache under "kvq" attention, eager, and as a CUDA graph where the recipe can

Time is that of the generated tokens: the steps' median and quartiles, the worst (where a block is encoded), and tokens
per second of all. Memory is what was allocated at the most, weights included, and what the cache holds at the end.
Batches: those asked for, and with "most" the largest power of two that fits. On a GPU all kernels are compiled before,
in all cores. Results are added to benchmarks/results/generation-<device>.jsonl, or to $OUT, and not measured again.

python -m benchmarks.generation [--models llama-3.1-8b] [--recipes kivi-2bit-g128] [--prompt 16384] [--batches 8,1,most]
python -m benchmarks.generation --device cpu --layers 2 --prompt 256 --batches 1: the same, small, on any machine
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks import compiling, report
from benchmarks.clock import Deadline, captured, unsynchronized
from benchmarks.compiling import Job
from benchmarks.gpu import Task, each
from benchmarks.report import RESULTS, Line, gpu_name, keep, known, name_of, place
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE

CONFIGS = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    ),
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=131072,
    ),
}  # fmt: skip

# No mask is made for a name without one.
AttentionInterface.register("unmasked", sdpa_attention_forward)

COMPILE = 0.4  # of the time
NEW = 128  # tokens generated, as many as a block has
WARM = 2  # steps before those that are timed
SPARE = 8  # tokens that a buffer has room for beyond what is timed
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Way:
    """A way to generate: a cache, an attention, as a graph or step by step."""

    cache: str
    attention: str
    graph: bool

    def make(self, model: PreTrainedModel, tokens: int) -> Cache:
        """An empty cache, with room for so many tokens."""
        if self.cache == "dynamic":
            return DynamicCache(config=model.config)
        if self.cache.startswith("static"):
            return StaticCache(config=model.config, max_cache_len=tokens)
        return KVQCache.from_recipe(self.cache, model)


def ways(recipes: list[str], gpu: bool) -> list[Way]:
    """Everything that takes part; what is a graph on a GPU is taken step by step elsewhere."""
    static = [Way("static", "sdpa", gpu), Way("static unmasked", "unmasked", gpu)]
    ours = [Way(recipe, "kvq", graph) for recipe in recipes for graph in ((True, False) if gpu else (False,))]
    return [*ours[:1], *static, *ours[1:], Way("dynamic", "sdpa", False)]


def random_model(name: str, device: str | torch.device, **changed: Any) -> PreTrainedModel:
    """A model of that geometry, bfloat16, with some numbers of its config changed."""
    config = CONFIGS[name]
    if changed:
        config = type(config)(**(config.to_dict() | {"layer_types": None} | changed))
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def repeat(cache: Cache, batch: int) -> None:
    """Make of one row so many."""
    if batch > 1 and isinstance(cache, StaticCache):  # which does not do so itself
        for layer in cache.layers:
            layer.keys, layer.values = (x.repeat_interleave(batch, 0) for x in (layer.keys, layer.values))
    elif batch > 1:
        cache.batch_repeat_interleave(batch)


def held(cache: Cache) -> int:
    """Bytes that a cache holds."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))  # type: ignore[attr-defined]


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
    logits = model(ids, **{CACHE: cache}, logits_to_keep=1).logits
    whole.set()
    repeat(cache, batch)
    token = logits[:, -1:].argmax(-1).expand(batch, 1).clone()
    place = torch.full((batch, 1), prompt, device=device)

    def step() -> torch.Tensor:
        out = model(token, position_ids=place, **{CACHE: cache}, logits_to_keep=1).logits
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
        from kvq_runtime.hf import recorded as steps

        while steps.not_yet(cache.blocks):
            token.copy_(step())
            place += 1
        return steps.captured(cache.blocks, step)
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


def batches(text: str) -> Iterator[int]:
    """Those asked for; with "most", powers of two beyond them, without end."""
    asked = [int(n) for n in text.split(",") if n != "most"]
    yield from asked
    if "most" in text.split(","):
        yield from (2**n for n in range(11) if 2**n > max(asked, default=0))


def planned(given: argparse.Namespace, before: dict[tuple, Line]) -> list[tuple[Line, Way]]:
    """(the line to come, way) of all that is asked for and was not measured before, in its order."""
    gpu, found = given.device.startswith("cuda"), []
    for name, batch in itertools.product(given.models.split(","), batches(given.batches)):
        for way in ways(given.recipes.split(","), gpu):
            layers = given.layers or CONFIGS[name].num_hidden_layers
            about = {"what": "generate", "model": name, "cache": way.cache, "graph": way.graph, "batch": batch}
            about |= {"prompt": given.prompt, "layers": layers}
            if "error" in before.get(name_of(about), {"error": "never tried"}):
                found.append((about, way))
    return found


def jobs(found: list[tuple[Line, Way]]) -> list[Job]:
    """The batches up to 64 that are compiled before: larger ones are asked for to find out what fits."""
    return [
        Job("generate", about["model"], way.cache, about["batch"], prompt=about["prompt"])
        for about, way in found
        if way.attention == "kvq" and about["batch"] <= 64
    ]


def lines(given: argparse.Namespace, before: dict[tuple, Line]) -> Iterator[Line]:
    """A line of every cache, batch by batch; of one that is out of memory at a batch, no larger one."""
    deadline, gpu, found = Deadline(60 * given.minutes), given.device.startswith("cuda"), planned(given, before)
    wanted, models, full = jobs(found), {}, {}
    if gpu and wanted:
        yield compiling.stage(wanted, deadline.part(COMPILE))[1]

    def prepare(about: Line) -> None:
        name = about["model"]
        if name not in models:
            models.clear()  # the last is forgotten before the next is made
            models[name] = random_model(name, given.device, num_hidden_layers=about["layers"])
            warm(models[name], given.prompt)

    def measured(about: Line, way: Way) -> Line:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        return generate(models[about["model"]], way, about["batch"], given.prompt, given.new)

    def of(about: Line) -> tuple:
        return about["model"], about["cache"], about["graph"]

    def too_large(about: Line) -> bool:
        return about["batch"] > full.get(of(about), about["batch"])

    tasks = [Task(about, (), partial(measured, about, way)) for about, way in found]
    for line in each(tasks, deadline, gpu, too_large, prepare):
        if line.get("out_of_memory"):
            full[of(line)] = line["batch"]
        yield line


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.1-8b", help="of " + ", ".join(CONFIGS))
    parser.add_argument("--recipes", default="kivi-2bit-g128,rtn-4bit", help="which need no calibration")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of a row's prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens generated in a row")
    parser.add_argument("--batches", default="8,1,32", help='numbers of rows, and "most"')
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--minutes", type=float, default=2.3, help="of the whole run")
    parser.add_argument("--out", type=Path, help="JSON lines, by default as above")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    return parser.parse_args(given)


def main(arguments_given: list[str] | None = None) -> int:
    """Measure, print JSON lines and keep them."""
    given = arguments(arguments_given)
    on_gpu = given.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device; --device cpu --layers 2 --prompt 256 --batches 1 runs anywhere", file=sys.stderr)
        return 1
    if not on_gpu and "most" in given.batches:
        print('--batches with "most" needs a GPU, whose memory is the bound; give numbers', file=sys.stderr)
        return 2
    out = given.out or place("generation", gpu_name() if on_gpu else "cpu")
    before = {} if given.again else known(RESULTS / out.name, out)
    found = keep(lines(given, before), out)
    print("\n".join(report.page([*before.values(), *found])), file=sys.stderr)
    return 0


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
