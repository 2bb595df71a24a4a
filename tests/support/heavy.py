"""A recipe of heavy hitters with a small window, passes over its cache, and what the cache holds."""

import torch
from feeding import GEOMETRY, rotary
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.recipes.h2o import HeavyHitters
from kvq_runtime.stages.exact import Exact

SINKS, RECENT, BLOCK, SHARE = 2, 6, 8, 0.4
SCHEME, WINDOW = Scheme(Exact()), Window(SINKS, RECENT, BLOCK)
EXACT = Recipe("h2o-small", SCHEME, SCHEME, window=WINDOW, policies=(HeavyHitters(SHARE),))


GROUP, SCALE = 2, GEOMETRY.head_size**-0.5


def queries(tokens: int) -> Tensor:
    """Of all layers, [L, B, heads, T, D], a few of them so large that their attention is a matter of few tokens."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(GEOMETRY.layers, 2, GROUP * GEOMETRY.kv_heads, tokens, GEOMETRY.head_size, generator=generator)
    return q * (1 + 3 * (torch.rand(tokens, 1, generator=generator) > 0.7))


def drive(cache: BlockCache, x: Tensor, q: Tensor, stop: int, real: Tensor | None = None, layers: int = 3) -> Tensor:
    """One forward pass, of which a prompt's newest queries alone are told, as a model does it; what they get."""
    start, out = cache.length, []
    positions = None if real is None else (real.cumsum(1) - 1).clamp(min=0)[:, start:stop]
    cache.positions.announce(None if real is None else real[:, start:stop], positions, rotary(cache.geometry))
    count = stop - start if start else min(stop, cache.policies.newest)
    mask = torch.ones(stop, stop, dtype=torch.bool).tril()[-count:]
    for layer in range(layers):
        cache.take(layer, *x[layer, :, :, start:stop].unbind(0))
        seen = None if real is None else mask & real[:, None, None, :stop]
        out.append(cache.attend(layer, q[layer, :, :, stop - count : stop], seen, SCALE))
        cache.finish(layer)
    return torch.stack(out)


def held(cache: BlockCache) -> list[list[int]]:
    """The tokens that each row holds."""
    tokens, rows = cache.positions.tokens_BT, cache.rows
    return [list(range(cache.positions.length))] * rows if tokens is None else tokens.tolist()
