"""Count the bytes of a recipe's cache: fill one, and add up what it holds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.memory import MemoryReport

TOKENS = 4096


@torch.inference_mode()
def bits_at(
    recipe: Recipe,
    geometry: Geometry,
    tokens: int = TOKENS,
    tensors: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> MemoryReport:
    """The report of a cache that holds `tokens` tokens of one row of a 16-bit model: no byte is computed, all are held.

    The contents are noise: what is held depends on shapes alone. A dynamic window is billed at its longest.
    """
    cache = BlockCache(recipe.widest, geometry, tensors)
    noise = torch.Generator().manual_seed(0)
    turning = Rotary(torch.arange(1, geometry.head_size // 2 + 1, device=device).float().reciprocal(), 1.0, dtype)
    for count in (tokens - 1, 1):  # a prompt, then a step, so that room taken for the prompt alone is given back
        if count == 0:
            continue
        cache.positions.announce(None, None, turning)
        for layer in range(geometry.layers):
            k_BTC, v_BTC = torch.randn(2, 1, count, geometry.width, generator=noise).to(device, dtype)
            cache.take(layer, k_BTC, v_BTC)
            cache.take_queries(layer, k_BTC.unflatten(-1, (geometry.kv_heads, -1)).transpose(1, 2))
            cache.finish(layer)
    return cache.memory_report()


def costs(
    recipe: Recipe, geometry: Geometry, length: int, tensors: Mapping[str, Tensor] | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Bits per element: asymptotic, and of caches that hold `length` and 4096 tokens; bytes of the latter."""
    here, there = (bits_at(recipe, geometry, tokens, tensors, device=device) for tokens in (length, TOKENS))
    return {
        "asymptotic": here.asymptotic_bits,
        "at_length": here.bits_per_element,
        f"at_{TOKENS}": there.bits_per_element,
        f"all_at_{TOKENS}": there.all_bits,
        f"bytes_at_{TOKENS}": there.total_bytes,
        f"exact_bytes_at_{TOKENS}": there.exact_bytes,
        "shared_bytes": there.shared_bytes,
        "smaller_from": there.smaller_than_higgs_from,
    }
