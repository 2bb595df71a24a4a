"""On a device: a pass waits for it once, whatever the layers, and refuses what is not finite when it ends.

What torch is asked that would wait is counted.
"""

import pytest
import torch
from feeding import GEOMETRY, RECIPES, feed, feed_in, make, rotary, same, state, tensors
from operations import operations

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry

FAMILIES = ("exact", "kivi-2bit", "aqua-2bit", "svdq-shadow-2bit-v4")


def waits(layers: int, padded: bool) -> list[float]:
    """Of passes of tokens that encode nothing, one block, two blocks."""
    recipe, geometry = RECIPES["rtn-2bit"], Geometry(layers, 2, 32)
    cache, block = BlockCache(recipe, geometry), recipe.window.block
    x, at, found = tensors(5 * block, 2, geometry), 0, []
    for count in (recipe.window.recent + block - 2, 1, 1, 2 * block):
        real = torch.arange(at, at + count) >= torch.tensor([3 * padded, 0])[:, None] if padded else None
        cache.positions.announce(real, None, rotary(geometry))

        def one() -> None:
            for layer in range(layers):
                cache.take(layer, *x[layer, :, :, at : at + count].unbind(0))  # noqa: B023
                cache.finish(layer)

        found.append(operations(one)["waits"])
        at += count
    assert cache.layers[0].blocks == 3
    return found[1:]


def test_a_pass_waits_once_for_all_layers():
    assert waits(2, False) == waits(6, False) == [0, 1, 1]
    assert waits(2, True) == waits(6, True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bad_number_is_refused_by_name_and_leaves_no_trace(name):
    recipe = RECIPES[name]
    recent, block = recipe.window.recent, recipe.window.block
    total = recent + 5 * block
    x, cache, other = tensors(total), make(recipe), make(recipe)
    feed_in(cache, x, [recent + 2 * block - 2])
    before = state(cache)
    for bad, (layer, role, side) in zip((torch.nan, -torch.inf), ((1, 0, "keys"), (2, 1, "values")), strict=True):
        broken = x.clone()
        broken[layer, role, 1, 3 * block, 7] = bad
        with pytest.raises(ValueError, match=f"layer {layer}, from token .* on: .* {side};"):
            feed(cache, broken, cache.length, total)
        assert cache.length == recent + 2 * block - 2 and same(before, state(cache))
    feed_in(cache, x, [total - cache.length])
    feed_in(other, x, [total])
    assert cache.reencoded == 0 and same(state(cache), state(other))


def test_a_bad_number_in_padding_is_none():
    recipe = RECIPES["aqua-2bit"]
    total = recipe.window.recent + 2 * recipe.window.block
    x, cache, other = tensors(total), make(recipe), make(recipe)
    broken, real = x.clone(), torch.arange(total) >= torch.tensor([0, 10])[:, None]
    broken[:, :, 1, 3] = torch.nan
    feed_in(cache, broken, [total - 1, 1], real_BT=real)
    feed_in(other, x, [total - 1, 1], real_BT=real)
    assert cache.layers[0].blocks and same(state(cache), state(other))


def test_what_was_watched_in_a_pass_that_failed_is_forgotten():
    recipe, x = RECIPES["rtn-2bit"], tensors(200)
    size, cache = recipe.window.recent + recipe.window.block, make(recipe)
    broken = x.clone()
    broken[0, 0, 0, 3] = torch.nan
    feed(cache, broken, 0, size, layers=range(GEOMETRY.layers - 1))  # stops midway: nobody has looked
    feed(cache, x, 0, size)
    assert cache.length == size
