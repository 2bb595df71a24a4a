"""The caches that generation is measured with, 16 bit and packed, and a model of random weights that takes them."""

from dataclasses import dataclass
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

# No mask is made for a name without one.
AttentionInterface.register("unmasked", sdpa_attention_forward)


@dataclass(frozen=True)
class Way:
    """How to generate: with which cache, under which attention, as a graph or step by step."""

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
