"""Generate with a model of random weights: tokens per second and peak memory, kvq against transformers' DynamicCache.

A prompt of random tokens is taken in, 2048 at a time, then tokens are generated greedily, one forward pass each. Time
is that of the generated tokens; memory is what was allocated at the most, weights included, and what the cache holds at
the end. Batches: those asked for, and with "most" the largest power of two that fits. Under "kvq" attention and, on a
GPU, as a CUDA graph too, where the recipe can.

python -m benchmarks.generation [--models llama-3.1-8b] [--recipes kivi-2bit-g128] [--prompt 16384] [--batches 1,most]
python -m benchmarks.generation --device cpu --layers 2 --prompt 256: the same, small, on any machine
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel, Qwen2Config

from benchmarks.lines import RESULTS, gpu_name, keep
from kvq_runtime.hf import KVQCache

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
CHUNK = 2048  # tokens of a prompt that are taken in at once
Step = Callable[[], torch.Tensor]


def random_model(name: str, device: str, layers: int | None = None) -> PreTrainedModel:
    """A model of that geometry, bfloat16."""
    config = CONFIGS[name]
    if layers is not None:
        config = type(config)(**(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}))
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def generate(model: PreTrainedModel, cache: Cache, batch: int, prompt: int, new: int, graph: bool) -> dict[str, Any]:
    """Take in a prompt, generate `new` tokens, and say how it went."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device, generator=generator)
    begun = _now(device)
    for chunk in ids.split(CHUNK, 1):
        logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits
    taken = _now(device) - begun
    token, place = logits[:, -1:].argmax(-1), torch.full((batch, 1), prompt, device=device)

    def step() -> torch.Tensor:
        out = model(token, position_ids=place, past_key_values=cache, logits_to_keep=1).logits
        return out[:, -1:].argmax(-1)

    forward = _recorded(cache, step, token, place) if graph else step
    begun, made = _now(device), 0
    for _ in range(new):
        token.copy_(forward())
        place += 1
        made += batch
    seconds = _now(device) - begun
    held = cache.memory_report().total_bytes if isinstance(cache, KVQCache) else _bytes(cache)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "tokens_per_s": round(made / seconds, 2),
        "ms_per_step": round(1e3 * seconds / new, 3),
        "prompt_s": round(taken, 3),
        "cache_bytes": held,
        "peak_bytes": peak,
    }


def _recorded(cache: Cache, step: Step, token: torch.Tensor, place: torch.Tensor) -> Step:
    """The step as a CUDA graph, once it does not encode a block: eager steps come first."""
    from kvq_runtime.attention.cuda_graph import captured

    assert isinstance(cache, KVQCache)
    while any(store.beyond(store.recent, 1) for store in cache.blocks.layers.values()):
        token.copy_(step())
        place += 1
    return captured(cache.blocks, step)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _bytes(cache: Cache) -> int:
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))  # type: ignore[attr-defined]


def ways(model: PreTrainedModel, recipes: list[str]) -> Iterator[tuple[str, bool, Callable[[], Cache]]]:
    """(name, as a graph, what makes its cache) of everything that takes part."""
    yield "dynamic", False, lambda: DynamicCache(config=model.config)
    for name in recipes:
        yield name, False, lambda name=name: KVQCache.from_recipe(name, model)
        if next(model.parameters()).is_cuda and KVQCache.from_recipe(name, model).refusal is None:
            yield name, True, lambda name=name: KVQCache.from_recipe(name, model)


def rows(name: str, model: PreTrainedModel, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for every cache and batch; `most` doubles the batch until memory is full."""
    for cache, graph, make in ways(model, given.recipes.split(",")):
        model.set_attn_implementation("sdpa" if cache == "dynamic" else "kvq")
        most, asked = "most" in given.batches, [int(n) for n in given.batches.split(",") if n != "most"]
        batches = asked + ([2**n for n in range(11) if 2**n > max(asked, default=0)] if most else [])
        for batch in batches:
            about = {"model": name, "cache": cache, "graph": graph, "batch": batch, "prompt": given.prompt}
            if given.device.startswith("cuda"):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                yield about | generate(model, make(), batch, given.prompt, given.new, graph)
            except torch.OutOfMemoryError:
                yield about | {"out_of_memory": True}
                break


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONFIGS), help="of " + ", ".join(CONFIGS))
    parser.add_argument("--recipes", default="kivi-2bit-g128,higgs-head-2bit", help="which need no calibration")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of a row's prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens generated in a row")
    parser.add_argument("--batches", default="1,most", help='numbers of rows, and "most"')
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--out", type=Path, help="JSON lines, by default benchmarks/results/generation-<device>.jsonl")
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
    found = (
        line
        for name in given.models.split(",")
        for line in rows(name, random_model(name, given.device, given.layers), given)
    )
    keep(found, given.out or RESULTS / f"generation-{gpu_name() if on_gpu else 'cpu'}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
