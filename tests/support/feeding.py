"""Drive a BlockCache as a model would: layer by layer, one forward pass at a time, with random keys and values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import fitted
import pytest
import torch
from torch import Tensor

from kvq_runtime.artifact.recipe_text import read as read_recipe
from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary, rotate
from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import OURS, Recipe, Window
from kvq_runtime.store.memory import MemoryReport

GEOMETRY = Geometry(layers=3, kv_heads=2, head_size=32)
Pairs = list[tuple[Tensor, Tensor]]
Query = Callable[[Tensor, Tensor], Tensor]


def small(recipe: Recipe, geometry: Geometry = GEOMETRY) -> Recipe:
    """The recipe with the smallest block, and a window to match, that its groups allow; sinks stay its own.

    What is fitted online is fitted to so many tokens, not to a prompt: its blocks are those of the tokens alone.
    """
    for block in (16, 32, 64, 128, 256):
        policies = tuple(PromptFit(2 * block - 4) if policy.fits_prompt else policy for policy in recipe.policies)
        candidate = replace(recipe, window=Window(recipe.window.sinks, block - 4, block), policies=policies)
        try:
            return candidate.check(geometry)
        except ValueError:
            continue
    return recipe


def whole(recipe: Recipe) -> Recipe:
    """The recipe without a choice among tokens, if it makes one: all that other recipes owe, it then owes too."""
    return replace(recipe, policies=tuple(replace(each, **WHOLE.get(each.kind, {})) for each in recipe.policies))


WHOLE: dict[str, dict[str, Any]] = {  # settings of policies with which all tokens are held and read
    "heavy": {"share": 1.0, "recent": 0.0},
    "votes": {"tokens": 1 << 20},
    "chunks": {"outliers": 0},
}
REPRESENTATIVE = (  # one recipe of each combination of stages and policies
    "exact", "exact-pre", "rtn-2bit", "kivi-2bit", "quarot-2bit", "higgs-2bit", "mean-higgs-2bit",
    "mean-higgs-head-2bit-post", "lloyd-3bit", "mean-lloyd-3bit-post", "turboquant-3bit",
    "kvquant-3bit", "gear-2bit", "zipcache-2bit", "oscar-2bit", "polar-paper", "polar-paper-fitted+all.rotate=none",
    "kvarn-k4v2", "polar-online", "squat-2bit", "squat-pre-2bit-paper", "squat-online-2bit", "svdq-2bit",
    "svdq-wf-2bit-v4+key.rotate=gradient_basis", "svdq-online-2bit",
    "subkv-2bit", "aqua-2bit", "aqua-2bit+position=post", "aqua-2bit+key.axis=channel+value.axis=channel",
    "aqua-2bit+key.predict=low_rank+value.predict=mlp", "aqua-2bit+all.predict.storage=gptq4+all.predict.below=1,2",
    "aqua-fisher-1bit", "aqua-h2o-2bit", "fisher-2bit", "fisher-head-3bit",
)  # fmt: skip


class Recipes(dict[str, Recipe]):
    """Recipes as `recipe_text.read` takes them, with small blocks and no choice among tokens; each made when asked."""

    def __missing__(self, name: str) -> Recipe:
        return self.setdefault(name, whole(small(read_recipe(name))))


RECIPES = Recipes()
SLOW = (  # what takes long, or differs from another one in a width or a rotation
    "quarot-2bit", "mean-higgs-2bit", "turboquant-3bit", "kvquant-3bit", "gear-2bit", "kvarn-k4v2", "polar-online",
    "polar-paper-fitted+all.rotate=none", "squat-online-2bit", "svdq-online-2bit",
    "svdq-wf-2bit-v4+key.rotate=gradient_basis",
    "aqua-2bit+all.predict.storage=gptq4+all.predict.below=1,2", "aqua-fisher-1bit", "aqua-h2o-2bit",
    "fisher-head-3bit",
)  # fmt: skip
every_recipe = pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in REPRESENTATIVE],
    indirect=True,
)


def rotary(geometry: Geometry = GEOMETRY, scaling: float = 1.0, dtype: torch.dtype = torch.float32) -> Rotary:
    """A plain RoPE over the whole head."""
    half = geometry.head_size // 2
    return Rotary(10_000.0 ** (-torch.arange(half) / half), scaling, dtype)


def tensors(tokens: int, rows: int = 2, geometry: Geometry = GEOMETRY, seed: int = 0) -> Tensor:
    """Keys and values of all layers as a model caches them, [L, 2, B, T, C]: channels of unequal size, and a mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(geometry.layers, 2, rows, tokens, geometry.width, generator=generator)
    channel = torch.rand(geometry.layers, 2, 1, 1, geometry.width, generator=generator)
    return x * (0.5 + channel) + channel


def turned(x_LKBTC: Tensor, geometry: Geometry = GEOMETRY, scaling: float = 1.0) -> Tensor:
    """The same with its keys after RoPE at positions 0, 1, 2, ..."""
    out = x_LKBTC.clone()
    tables = rotary(geometry, scaling).tables(torch.arange(out.shape[3])[None])
    for keys in out[:, 0]:
        keys.copy_(rotate(keys.unflatten(-1, (geometry.kv_heads, -1)), *tables).flatten(-2))
    return out


def make(recipe: Recipe, geometry: Geometry = GEOMETRY) -> BlockCache:
    """A cache, with random fitted tensors where the recipe wants some."""
    return BlockCache(recipe, geometry, fitted.tensors(recipe, geometry) or None)


def newest(k_BTC: Tensor, v_BTC: Tensor) -> Tensor:
    """Queries that attend to their own token, so that a dynamic window keeps no more than the recent tokens."""
    return 100 * k_BTC


def oldest(k_BTC: Tensor, v_BTC: Tensor) -> Tensor:
    """Queries that attend to anything but their own token, so that a dynamic window keeps what it may."""
    return -100 * k_BTC


def anything(k_BTC: Tensor, v_BTC: Tensor) -> Tensor:
    """Queries that have nothing to do with the keys: a dynamic window now keeps, now lets go."""
    return v_BTC


def attended(
    cache: BlockCache, layer: int, k_BTC: Tensor, v_BTC: Tensor, real_BT: Tensor | None, query: Query
) -> tuple[Tensor, Tensor]:
    """What `update` gives, by the way of recipes that want queries or attention: the newest token's attend."""
    cache.take(layer, k_BTC, v_BTC)
    q_BHTD = query(k_BTC, v_BTC).unflatten(-1, (cache.geometry.kv_heads, -1)).transpose(1, 2)
    if k_BTC.shape[1] and "attention" in cache.recipe.needs:
        mask = None if real_BT is None else real_BT[:, None, None, : cache.positions.length]
        cache.attend(layer, q_BHTD[:, :, -1:], mask, cache.geometry.head_size**-0.5)
    cache.take_queries(layer, q_BHTD)
    out = cache.decoder.whole(layer)
    cache.finish(layer)
    return out


def feed(
    cache: BlockCache,
    x_LKBTC: Tensor,
    start: int,
    stop: int,
    real_BT: Tensor | None = None,
    scaling: float = 1.0,
    layers: Sequence[int] | None = None,
    query: Query = newest,
) -> Pairs:
    """One forward pass over the tokens from `start` to `stop`; what each layer attended to."""
    positions, real = torch.arange(start, stop)[None], None
    if real_BT is not None:
        positions = (real_BT.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        real = real_BT[:, start:stop]
    cache.positions.announce(real, positions, rotary(cache.geometry, scaling))
    layers = range(len(x_LKBTC)) if layers is None else layers
    out = []
    for layer in layers:  # copied: the next layer decodes into the same memory
        k_BTC, v_BTC = x_LKBTC[layer, :, :, start:stop].unbind(0)
        if cache.recipe.needs & OURS:
            keys, values = attended(cache, layer, k_BTC, v_BTC, real_BT, query)
        else:
            keys, values = cache.update(layer, k_BTC, v_BTC)
        out.append((keys.clone(), values.clone()))
    return out


def feed_in(cache: BlockCache, x_LKBTC: Tensor, sizes: Sequence[int], **settings) -> list[Pairs]:
    """Forward passes of these numbers of tokens, one after the other."""
    start, out = cache.length, []
    for size in sizes:
        out.append(feed(cache, x_LKBTC, start, start + size, **settings))
        start += size
    return out


def state(cache: BlockCache) -> list[dict[str, Tensor]]:
    """What each layer holds: fields of blocks, window and sinks of keys, and of values, and what policies add."""
    found = []
    for _, store in sorted(cache.layers.items()):
        sinks_2BSC, window_2BTC = store.sinks_2BSC, store.window_2BTC
        arrived = cache.positions.sink_slots(sinks_2BSC.shape[2], store.rows, sinks_2BSC.device)[1]
        for role in (0, 1):
            held = {"window": window_2BTC[role].clone(), "sinks": sinks_2BSC[role].where(arrived[..., None], 0.0)}
            for run in store.runs:
                fields = store.fields(role, *run)
                for name, field in fields.items():
                    held[name] = torch.cat([held[name], field], 1) if name in held else field.clone()
            found.append(held)
    return found


def same(one: list[dict[str, Tensor]], two: list[dict[str, Tensor]]) -> bool:
    """Whether two states are equal, bit for bit."""
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, two, strict=True)
    )


def read(cache: BlockCache, scaling: float = 1.0) -> Pairs:
    """What each layer would attend to now: a forward pass over no tokens."""
    like = cache.layers[0].buffer_2BTC
    empty = like.new_empty(cache.geometry.layers, 2, cache.rows, 0, cache.geometry.width)
    return feed(cache, empty, 0, 0, scaling=scaling)


def error(found: Tensor, expected: Tensor) -> float:
    """The relative root-mean-square error."""
    return float((found - expected).norm() / expected.norm())


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
