"""Odd shapes, bad numbers and interrupted forward passes: the cache is right, or says what is wrong and goes on."""

import gaussian_rate
import pytest
import torch
from feeding import (
    GEOMETRY,
    RECIPES,
    error,
    feed,
    feed_in,
    make,
    read,
    rotary,
    tensors,
)

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import ROLES
from kvq_runtime.ops.rope import rotate
from kvq_runtime.store.encode import Encoder

CHAINED = ("aqua-2bit", "aqua-2bit+position=post", "aqua-fisher-1bit")
PRE = ("exact-pre", "mean-higgs-2bit", "svdq-2bit", "aqua-2bit")


# ---- forward passes that stop midway ----


def test_a_first_pass_that_stops_midway_may_be_followed_by_another_batch():
    recipe = RECIPES["aqua-2bit"]
    cache, x = make(recipe), tensors(60, rows=1)
    feed(cache, tensors(60, rows=3), 0, 60, layers=[0, 1])
    assert all(a is not None for a in feed(cache, x, 0, 60))
    with pytest.raises(ValueError, match="3 rows; the cache holds 1"):
        feed(cache, tensors(61, rows=3), 60, 61)
    feed_in(cache, tensors(61, rows=1), [1])
    assert cache.length == 61


@pytest.mark.parametrize("recipe", CHAINED, indirect=True)
def test_a_layer_before_the_one_below_is_refused(recipe):
    cache, x = make(recipe), tensors(40)
    with pytest.raises(RuntimeError, match="layer 1 is predicted from layer 0"):
        feed(cache, x, 0, 40, layers=[1])


# ---- chains of predictions ----


@pytest.mark.parametrize("recipe", CHAINED, indirect=True)
def test_history_in_order_is_history_from_scratch(recipe):
    """Against the chain written out: every layer decoded from all of its blocks, bottom up."""
    recent, block = recipe.window.recent, recipe.window.block
    x, cache = tensors(recent + 3 * block), make(recipe)
    feed_in(cache, x, [recent + 2 * block, block])
    decoded: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, pair in enumerate(read(cache)):
        fields = [{n: f.flatten(0, 1) for n, f in cache.layers[layer].fields(role, 0, 3).items()} for role in (0, 1)]
        below = decoded[::-1]
        keys = cache.codecs[layer][0].decode(fields[0], Context(below=below))
        values = cache.codecs[layer][1].decode(fields[1], Context(below=below, keys=keys))
        decoded.append((keys.clone(), values.clone()))
        start, stop = min(recipe.window.sinks, 3 * block), 3 * block
        expected = cache.codecs[layer][1].restore(values.float(), Context()).view(2, stop, -1)
        torch.testing.assert_close(pair[1][:, start:stop], expected[:, start:], rtol=1e-5, atol=1e-5)


# ---- RoPE (invariant 9) ----


@pytest.mark.parametrize("recipe", PRE, indirect=True)
def test_keys_are_encoded_as_they_were_before_rope(recipe, monkeypatch):
    """Also where the cosines carry a factor, as YaRN's do, and for rows whose positions differ."""
    scaling = 1.3069
    sinks, recent, block = recipe.window.sinks, recipe.window.recent, recipe.window.block
    total = recent + 2 * block
    x, seen = tensors(total), {}
    real = torch.arange(total) >= torch.tensor([0, 5])[:, None]
    given = x.clone()
    tables = rotary(scaling=scaling).tables((real.cumsum(1) - 1).clamp(min=0))
    for keys in given[:, 0]:
        keys.copy_(rotate(keys.unflatten(-1, (2, 32)), *tables).flatten(-2))
    inputs = Encoder._inputs

    def watching(self, store, role, run):
        x_NTC, context = inputs(self, store, role, run)
        seen.setdefault((store.layer, ROLES[role]), []).append(x_NTC.clone())
        return x_NTC, context

    monkeypatch.setattr(Encoder, "_inputs", watching)
    cache = make(recipe)
    feed_in(cache, given, [block + 3, 1, total - block - 4], real_BT=real, scaling=scaling)
    assert seen.keys() == {(layer, role) for layer in range(len(x)) for role in ("key", "value")}
    for (layer, role), parts in seen.items():
        found = torch.cat(parts).unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)
        target = x[layer, int(role == "value"), :, : 2 * block]
        for row, first in enumerate((sinks, sinks + 5)):
            torch.testing.assert_close(found[row, first:], target[row, first:], rtol=1e-4, atol=1e-4)
    for layer, pair in enumerate(read(cache, scaling)):
        codec = cache.codecs[layer][0]
        if codec.scheme.quantize.kind != "exact":
            most = gaussian_rate.most(codec) * (1.3 if recipe.cross_layer else 1.0)
            assert error(pair[0][real], given[layer, 0][real]) < most


def test_exact_keys_survive_rope_and_back():
    """Within two units in the last place of the pair of channels that turns together."""
    recipe, dtype = RECIPES["exact-pre"], torch.bfloat16
    plain = tensors(600)
    tables = rotary(dtype=dtype).tables(torch.arange(600)[None])
    x = plain.to(dtype)
    for keys in x[:, 0]:
        keys.copy_(rotate(keys.unflatten(-1, (2, 32)), *tables).flatten(-2))
    cache = make(recipe)
    for start, stop in ((0, 580), (580, 600)):
        cache.positions.announce(None, torch.arange(start, stop)[None], rotary(dtype=dtype))
        for layer in range(3):
            cache.update(layer, *x[layer, :, :, start:stop].unbind(0))
    for layer, (keys, values) in enumerate(read_as(cache, dtype)):
        given = x[layer, 0]
        pair = (
            given.double().view(2, 600, 2, 2, 16).norm(dim=3, keepdim=True).expand(-1, -1, -1, 2, -1).reshape_as(given)
        )
        ulp = torch.finfo(dtype).eps * 2.0 ** pair.log2().floor()
        assert bool(((keys.double() - given.double()).abs() <= 2 * ulp).all())
        assert torch.equal(values, x[layer, 1])


def read_as(cache: BlockCache, dtype: torch.dtype):
    empty = torch.empty(2, 0, GEOMETRY.width, dtype=dtype)
    cache.positions.announce(None, None, rotary(dtype=dtype))
    return [tuple(x.clone() for x in cache.update(layer, empty, empty)) for layer in range(3)]


@pytest.mark.parametrize("name", ["aqua-2bit", "mean-higgs-2bit", "aqua-2bit+position=post", "exact-pre"])
def test_a_recipe_that_needs_positions_says_so_at_once(name):
    recipe = RECIPES[name]
    cache, x = make(recipe), tensors(3)
    with pytest.raises(RuntimeError, match="needs the positions of its tokens"):
        cache.update(0, *x[0].unbind(0))
    assert cache.length == 0
    feed_in(cache, x, [3])
