"""History that is kept decoded from pass to pass is what decoding it again gives."""

import pytest
import torch
from feeding import RECIPES, feed_in, make, tensors


def caches(recipe):
    """Two of the recipe; the second decodes each block once."""
    again, once = make(recipe), make(recipe)
    once.decoder.keep = True
    return again, once


@pytest.mark.parametrize("name", ["kivi-2bit", "aqua-2bit", "squat-pre-2bit"])
def test_blocks_decoded_once_are_those_decoded_again(name):
    recipe = RECIPES[name]
    recent, block = recipe.window.recent, recipe.window.block
    x, pair = tensors(recent + 5 * block + 70), caches(recipe)
    for size in (recent + block, 1, block, 2 * block, 1, 3):
        wanted, found = (feed_in(cache, x, [size]) for cache in pair)
        torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
    for cache in pair:
        cache.crop(cache.length - recent - block // 2)
        cache.reorder(torch.tensor([1, 0]))
    wanted, found = (feed_in(cache, x, [2]) for cache in pair)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
