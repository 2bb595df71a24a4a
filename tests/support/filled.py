"""Fill a cache with noise, so that what it holds can be counted."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.memory import MemoryReport


@torch.inference_mode()
def filled(
    recipe: Recipe, geometry: Geometry, tokens: int, tensors: Mapping[str, Tensor] | None = None
) -> MemoryReport:
    """The report of a cache of `tokens` tokens of one row of a 16-bit model; a dynamic window is at its longest."""
    cache = BlockCache(recipe.widest, geometry, tensors)
    noise = torch.Generator().manual_seed(0)
    turning = Rotary(torch.arange(1, geometry.head_size // 2 + 1).float().reciprocal(), 1.0, torch.bfloat16)
    for count in (tokens - 1, 1):  # a prompt, then a step, so that room taken for the prompt alone is given back
        if count == 0:
            continue
        cache.positions.announce(None, None, turning)
        for layer in range(geometry.layers):
            k_BTC, v_BTC = torch.randn(2, 1, count, geometry.width, generator=noise).to(torch.bfloat16)
            cache.take(layer, k_BTC, v_BTC)
            cache.take_queries(layer, k_BTC.unflatten(-1, (geometry.kv_heads, -1)).transpose(1, 2))
            cache.finish(layer)
    return cache.memory_report()
