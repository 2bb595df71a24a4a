"""The dynamic window: what attention decides, for all layers at once, and what it never changes; and SubKV, its
recipes: what they store, and what they leave exact.
"""

from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, anything, feed, feed_in, make, newest, oldest, read, same, state, tensors
from tiers import some

from kvq_runtime.codec.codec import Codec
from kvq_runtime.recipe import Recipe, Window, preset
from kvq_runtime.recipes import subkv

every = pytest.mark.parametrize(
    "recipe", ["subkv-2bit", pytest.param("subkv-aqua-2bit", marks=pytest.mark.slow)], indirect=True
)
STEPS = [40] + [1] * 50 + [7, 1, 33, 1, 1, 64, 90, 1, 1]


def fixed(recipe: Recipe) -> Recipe:
    """The recipe with a window that stays as it is."""
    return replace(recipe, policies=())


def decisions(recipe: Recipe, x, query, real_BT=None) -> list[int]:
    """Blocks held after each step."""
    cache, found = make(recipe), []
    for size in STEPS:
        feed_in(cache, x, [size], real_BT=real_BT, query=query)
        found.append(cache.layers[0].blocks)
    return found


# ---- the rule ----


def weights(new: list[float], edge: list[float], at: int, tokens: int = 10) -> torch.Tensor:
    """Weights of two query heads of one KV head in one row: these on the newest token and on the one at a place."""
    p = torch.full((1, 1, 2, tokens), 1e-3)
    p[0, 0, :, -1], p[0, 0, :, at] = torch.tensor(new), torch.tensor(edge)
    return p


def test_the_window_keeps_its_edge_unless_the_newest_token_is_attended_to_more():
    for new, edge, kept in (
        ((0.3, 0.1), (0.1, 0.2), False),
        ((0.1, 0.1), (0.3, 0.0), True),
        ((0.2, 0), (0, 0.2), True),
    ):
        gap_B = subkv.gaps(weights(list(new), list(edge), 4), 4, 1, None)
        assert gap_B[0] == pytest.approx(sum(new) / 2 - sum(edge) / 2)
        assert subkv.keep_edge(gap_B[None]) == kept


def test_the_mean_is_over_layers_and_rows_that_have_a_say():
    nan = torch.nan
    assert subkv.keep_edge(torch.tensor([[0.3, -0.1], [-0.2, -0.1]]))
    assert not subkv.keep_edge(torch.tensor([[0.3, nan], [-0.2, nan]]))
    assert not subkv.keep_edge(torch.full((2, 2), nan))


def test_the_edge_is_the_first_real_token_that_is_no_sink():
    p = torch.rand(3, 2, 2, 10)
    real = torch.arange(10) >= torch.tensor([0, 5, 9])[:, None]
    found = subkv.gaps(p, 4, 1, real)
    expected = (p[..., 9] - p[torch.arange(3), :, :, torch.tensor([4, 6, 0])]).mean((1, 2))
    assert torch.equal(found[:2], expected[:2])
    assert found[2].isnan()  # its only real token is its sink
    assert torch.equal(subkv.gaps(p, 0, 2, None), (p[..., 9] - p[..., 2]).mean((1, 2)))
    assert subkv.gaps(p, 9, 1, None).isnan().all()


# ---- what a cache makes of it ----


@pytest.mark.parametrize("recipe", ["subkv-2bit-by-layer", "subkv-2bit"], indirect=True)
def test_a_rule_that_always_lets_go_is_the_fixed_window(recipe):
    x = tensors(sum(STEPS))
    cache, other = make(recipe), make(fixed(recipe))
    for size in STEPS:
        feed_in(cache, x, [size], query=newest)
        feed_in(other, x, [size])
        assert same(state(cache), state(other))


@every
def test_a_rule_that_never_lets_go_is_a_fixed_window_at_the_cap(recipe):
    """From the first forward pass on in which the cap is reached; what the prompt encoded before stays encoded."""
    x = tensors(sum(STEPS))
    cache, other = make(recipe), make(recipe.widest)
    for size in STEPS:
        feed_in(cache, x, [size], query=oldest)
        feed_in(other, x, [size])
        held, wide = cache.layers[0], other.layers[0]
        assert held.blocks == max(wide.blocks, (STEPS[0] - recipe.window.recent) // recipe.window.block)
    assert wide.blocks > 2 and same(state(cache), state(other))


@every
def test_no_token_is_lost_and_the_cap_holds(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x, cache = tensors(sum(STEPS)), make(recipe)
    most, seen = recipe.policy("window").most(recent, block), set()
    for size in STEPS:
        start = cache.length
        for layer, pair in enumerate(feed(cache, x, start, start + size, query=anything)):
            for role, out in enumerate(pair):
                assert out.shape[1] == start + size
                newest_exact = max(0, start - recent)
                assert torch.equal(out[:, newest_exact:], x[layer, role, :, newest_exact : start + size])
        for layer, store in cache.layers.items():
            exact = store.window_2BTC.shape[2]
            assert store.length == cache.length and min(recent, cache.length) <= exact < most + block
            assert torch.equal(store.window_2BTC, x[layer, :, :, store.encoded : cache.length])
            assert store.blocks == cache.layers[0].blocks
            seen.add(store.recent)
    assert seen == {recent, most}  # attention decided both ways


@every
def test_padded_slots_have_no_say(recipe):
    """Whatever stands in them; and a row that has only begun has none."""
    x = tensors(sum(STEPS))
    real = torch.arange(x.shape[3]) >= torch.tensor([0, 45])[:, None]
    other = torch.where(real[:, :, None], x, 300 * torch.randn(x.shape))
    found = decisions(recipe, x, anything, real)
    assert found == decisions(recipe, other, anything, real)
    nobody = torch.arange(x.shape[3]) >= torch.tensor([0, x.shape[3] - 1])[:, None]
    alone = decisions(recipe, x[:, :, :1], anything)
    assert decisions(recipe, x, anything, nobody) == alone != found


@pytest.mark.parametrize("recipe", some(["subkv-2bit", "subkv-2bit-by-layer"], "subkv-2bit"), indirect=True)
def test_an_undone_pass_decides_as_before(recipe):
    """A pass that stops midway."""
    x, wrong = tensors(sum(STEPS)), tensors(sum(STEPS), seed=9)
    cache, other = make(recipe), make(recipe)
    for number, size in enumerate(STEPS):
        start = cache.length
        stop = start + size
        feed(cache, wrong, start, stop, layers=range(1 + number % 2), query=oldest)
        feed(cache, x, start, stop, query=anything)
        feed(other, x, start, stop, query=anything)
        assert same(state(cache), state(other))
        assert len(read(cache)) == len(x) and same(state(cache), state(other))  # reading decides nothing
    assert cache.reencoded == 0


@every
def test_a_crop_takes_back_what_the_cropped_tokens_said(recipe):
    """With nobody left to say anything, the next pass keeps no more than the recent tokens."""
    recent, block = recipe.window.recent, recipe.window.block
    x, cache = tensors(recent + 4 * block), make(recipe)
    feed_in(cache, x, [recent] + [1] * (2 * block), query=oldest)
    assert cache.layers[0].blocks == 0
    cache.crop(recent + 2 * block - 1)
    feed_in(cache, x, [1], query=oldest)
    assert cache.layers[0].blocks == 2 and cache.reencoded == 0
    cache.crop(block + 3)  # into a block
    feed_in(cache, x, [recent + block], query=oldest)
    assert cache.length == recent + 2 * block + 3 and len(read(cache)) == 3


@pytest.mark.parametrize("bits", [2, 4])
def test_settings_are_the_papers(bits):
    recipe = preset(f"subkv-{bits}bit")
    assert recipe.window == Window(1, 32, 32)
    assert (recipe.key.axis, recipe.value.axis) == ("channel", "token")
    for role in ("key", "value"):
        assert Codec(recipe, 0, role, GEOMETRY, {}).bits() == bits + 2 * 16 / 32
    assert recipe.widest.window.recent == 128
    assert not recipe.fitted and recipe.needs == {"attention"}
