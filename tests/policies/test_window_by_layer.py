"""The dynamic window of each layer by itself: what its own attention decides, in the pass that has attended."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from feeding import (
    GEOMETRY,
    RECIPES,
    Query,
    anything,
    attended,
    feed_in,
    make,
    newest,
    oldest,
    read,
    tensors,
)
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.recipe import preset
from kvq_runtime.recipes.subkv import DynamicWindow

RECIPE = RECIPES["subkv-2bit-by-layer"]
RECENT, BLOCK, SINKS = RECIPE.window.recent, RECIPE.window.block, RECIPE.window.sinks
MOST = RECENT + 3 * BLOCK
STEPS = [40] + [1] * 50 + [7, 1, 33, 1, 1, 64, 90, 1, 1]


def blocks(cache: BlockCache) -> list[int]:
    return [store.blocks for _, store in sorted(cache.layers.items())]


def expected_blocks(held: int, tokens: int, k_BTC: np.ndarray, q_BC: np.ndarray, real_BT: np.ndarray) -> int:
    """The rule in numpy: the newest query's weights on the newest token and on the oldest that may stay exact."""
    window = tokens - held * BLOCK
    free, forced = max(0, window - RECENT) // BLOCK, max(0, window - MOST) // BLOCK
    if not free:
        return held
    gaps, first = [], (held + forced) * BLOCK
    for row in range(len(k_BTC)):
        able = [t for t in range(first, tokens) if real_BT[row, t] and real_BT[row, : t + 1].sum() > SINKS]
        if not real_BT[row, -1] or not able or able[0] >= tokens - 1:
            continue
        for head in range(GEOMETRY.kv_heads):
            part = slice(head * GEOMETRY.head_size, (head + 1) * GEOMETRY.head_size)
            scores = k_BTC[row, :, part] @ q_BC[row, part] * GEOMETRY.head_size**-0.5
            scores = np.where(real_BT[row], scores, -np.inf)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            gaps.append((row, weights[-1] - weights[able[0]]))
    rows = sorted({row for row, _ in gaps})
    means = [np.mean([gap for row, gap in gaps if row == r]) for r in rows]
    return held + (forced if means and np.mean(means) <= 0 else free)


@pytest.mark.parametrize("short", [0, 45])
def test_each_layer_decides_by_the_weights_of_this_pass(short):
    """Against numpy, step by step; what attention sees of encoded tokens is what the cache decodes."""
    x, cache = tensors(sum(STEPS)), make(RECIPE)
    real = torch.arange(x.shape[3]) >= torch.tensor([0, short])[:, None]
    seen: set[tuple[int, ...]] = set()
    for size in STEPS:
        start, stop = cache.length, cache.length + size
        held = blocks(cache) or [0] * GEOMETRY.layers
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        cache.positions.announce(real[:, start:stop] if short else None, positions, None)
        for layer in range(GEOMETRY.layers):
            k_BTC, v_BTC = x[layer, :, :, start:stop].unbind(0)
            keys, _ = attended(cache, layer, k_BTC, v_BTC, real if short else None, anything)
            expected = expected_blocks(
                held[layer], stop, keys.double().numpy(), v_BTC[:, -1].double().numpy(), real[:, :stop].numpy()
            )
            assert cache.layers[layer].blocks == expected, (stop, layer)
        seen.add(tuple(b - min(blocks(cache)) for b in blocks(cache)))
    assert len(seen) > 2  # layers went their own ways


def last_lets_go(x_LKBTC: Tensor) -> Query:
    """Queries with which the last layer lets go of its oldest tokens, and the others do not."""
    last = x_LKBTC[-1, 0].flatten(0, 1)

    def query(k_BTC: Tensor, v_BTC: Tensor) -> Tensor:
        own = bool((last == k_BTC[0, 0]).all(-1).any())
        return newest(k_BTC, v_BTC) if own else oldest(k_BTC, v_BTC)

    return query


def test_a_crop_cuts_layers_with_blocks_of_their_own_numbers():
    x, cache = tensors(sum(STEPS)), make(RECIPE)
    feed_in(cache, x, STEPS, query=last_lets_go(x))
    length, left = cache.length, cache.length - RECENT - 5
    assert len(set(blocks(cache))) > 1
    cache.crop(left)
    assert {store.length for store in cache.layers.values()} == {left} == {pair[0].shape[1] for pair in read(cache)}
    feed_in(cache, x, [RECENT + 5], query=newest)
    assert {store.length for store in cache.layers.values()} == {length}
    assert set(blocks(cache)) == {(length - RECENT) // BLOCK}


def test_where_layers_are_predicted_from_layers_one_decides_for_all():
    recipe = preset("subkv-aqua-2bit")
    with pytest.raises(ValueError, match="which per=layer may keep exact there; use per=cache, or no prediction"):
        replace(recipe, policies=(DynamicWindow(per="layer"),)).check()
    with pytest.raises(ValueError, match='per=\'row\'; use "cache" or "layer"'):
        DynamicWindow(per="row")  # type: ignore[arg-type]
    assert preset("subkv-2bit-by-layer").to_json()["policies"] == [{"kind": "dynamic", "blocks": 3, "per": "layer"}]
