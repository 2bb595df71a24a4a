"""Drive a BlockCache as a model would: layer by layer, one forward pass at a time, with random keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import fitted
import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec import Codec, bits
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import OURS, Recipe, Side, presets
from kvq_runtime.rope import Rotary, rotate
from kvq_runtime.stages.low_rank import LowRank, LowRankSparse
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.online import FirstTokens
from kvq_runtime.stages.select import Heavy

GEOMETRY = Geometry(layers=3, kv_heads=2, head_size=32)
Pairs = list[tuple[Tensor, Tensor]]
Query = Callable[[Tensor, Tensor], Tensor]


def small(recipe: Recipe, geometry: Geometry = GEOMETRY) -> Recipe:
    """The recipe with the smallest block, and a window to match, that its groups allow; sinks stay its own.

    What is fitted online is fitted to so many tokens, not to a prompt: its blocks are those of the tokens alone.
    """
    for block in (16, 32, 64, 128, 256):

        def shrink(side: Side, block: int = block) -> Side:
            return replace(side, block=block, recent=block - 4)

        layers = {layer: (shrink(pair[0]), shrink(pair[1])) for layer, pair in recipe.layers.items()}
        online = recipe.online and FirstTokens(2 * block - 4)
        candidate = replace(recipe, key=shrink(recipe.key), value=shrink(recipe.value), layers=layers, online=online)
        try:
            return candidate.check(geometry)
        except ValueError:
            continue
    return recipe


def whole(recipe: Recipe) -> Recipe:
    """The recipe without a choice among tokens, if it makes one: all that other recipes owe, it then owes too."""
    if isinstance(recipe.select, Heavy):
        return replace(recipe, select=Heavy(share=1.0))
    return replace(recipe, select=replace(recipe.select, outliers=0)) if recipe.select is not None else recipe


RECIPES = {name: whole(small(recipe)) for name, recipe in presets().items()}


FEW = ("exact", "exact-pre", "higgs-2bit", "aqua-2bit", "aqua-2bit-post", "aqua-2bit-channel")
# every recipe in a model's usual dtype, a few in single precision
DTYPES = [(recipe, torch.bfloat16) for recipe in RECIPES.values()] + [(RECIPES[name], torch.float32) for name in FEW]
DTYPE_IDS = [f"{recipe.name}-{str(dtype).removeprefix('torch.')}" for recipe, dtype in DTYPES]


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
    cache.hear(layer, q_BHTD)
    if k_BTC.shape[1] and "attention" in cache.recipe.needs:
        mask = None if real_BT is None else real_BT[:, None, None, : cache.timeline.length]
        cache.attend(layer, q_BHTD[:, :, -1:], mask, cache.geometry.head_size**-0.5)
    out = cache.history.whole(layer)
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
    cache.timeline.announce(real, positions, rotary(cache.geometry, scaling))
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
    """Everything each stream holds: the fields of its blocks, its window, its sinks."""
    found = []
    for layer in sorted(cache.layers):
        for stream in cache.layers[layer]:
            rows, sinks = stream.sinks_BSC.shape[:2]
            arrived = cache.timeline.sink_slots(sinks, rows, stream.sinks_BSC.device)[1]
            held = {"window": stream.window_BTC.clone(), "sinks": stream.sinks_BSC.where(arrived[..., None], 0.0)}
            for run in stream.runs():
                for name, field in stream.fields(*run).items():
                    held[name] = torch.cat([held[name], field], 1) if name in held else field.clone()
            found.append(held)
    return found


def same(one: list[dict[str, Tensor]], two: list[dict[str, Tensor]]) -> bool:
    """Whether two states are equal, bit for bit."""
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, two, strict=True)
    )


def dropped(codec: Codec) -> float:
    """The share of channels that a codec stores nothing of: on this white data, the error it cannot but have."""
    if not isinstance(codec.side.quantize, Mixed):
        return 0.0
    return 1 - codec.side.quantize.stored(codec.geometry.width) / codec.geometry.width


def paid(codec: Codec) -> float:
    """Bits per element that buy precision: of this white data, no matrix of low rank is a part worth its bits."""
    side = codec.side
    if isinstance(side.correct, LowRank | LowRankSparse):
        side = replace(side, correct=side.correct.sparse if isinstance(side.correct, LowRankSparse) else None)
    return bits(side, codec.geometry)


def read(cache: BlockCache, scaling: float = 1.0) -> Pairs:
    """What each layer would attend to now: a forward pass over no tokens."""
    rows = len(cache.layers[0][0].sinks_BSC)
    dtype = cache.layers[0][0].sinks_BSC.dtype
    empty = torch.empty(cache.geometry.layers, 2, rows, 0, cache.geometry.width, dtype=dtype)
    return feed(cache, empty, 0, 0, scaling=scaling)


def error(found: Tensor, expected: Tensor) -> float:
    """The relative root-mean-square error."""
    return float((found - expected).norm() / expected.norm())
