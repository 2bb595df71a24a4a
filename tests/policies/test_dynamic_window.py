"""The dynamic window: what attention decides, for all layers at once, and what it never changes; and SubKV, its
recipes: what they store, what they leave exact, and whole models under them.
"""

from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, RECIPES, anything, feed, feed_in, make, newest, oldest, read, same, state, tensors
from generating import WAYS, generate, kvq, padded, replayed, stock
from models import prompt, random_model
from owned_bytes import owned
from tiers import together

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.recipe import Recipe, Scheme, Window, preset
from kvq_runtime.recipes import subkv
from kvq_runtime.recipes.subkv import DynamicWindow
from kvq_runtime.stages.rtn import Rtn

every = pytest.mark.parametrize("recipe", ["subkv-2bit", "subkv-aqua-2bit"], indirect=True)
STEPS = [40] + [1] * 50 + [7, 1, 33, 1, 1, 64, 90, 1, 1]
NAMES = ["subkv-2bit", "subkv-4bit"]


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


@pytest.mark.parametrize("blocks", [0, -1, 1025])
def test_settings(blocks):
    with pytest.raises(ValueError, match="use 1 to 1024"):
        DynamicWindow(blocks)


def test_what_cannot_be():
    scheme = Scheme(Rtn(2))
    with pytest.raises(ValueError, match="two policies for one choice"):
        Recipe("r", scheme, scheme, policies=(DynamicWindow(), DynamicWindow(2))).check()
    with pytest.raises(ValueError, match=r"policies=\(3,\); use some of .*'dynamic'"):
        Recipe("r", scheme, scheme, policies=(3,)).check()
    given = preset("subkv-2bit").to_json()
    for bad in ({"kind": "magic"}, {"kind": "dynamic", "blocks": "3"}, {"kind": "dynamic", "most": 3}, 3):
        with pytest.raises(ValueError, match="window"):
            Recipe.from_json(given | {"window": bad})
    assert "window" not in preset("kivi-2bit").to_json()


def test_update_is_refused_by_name():
    cache, x = make(RECIPES["subkv-2bit"]), tensors(3)
    with pytest.raises(RuntimeError, match=r"subkv-2bit needs attention, .* use take\(\), attend\(\) and finish\(\)"):
        cache.update(0, *x[0].unbind(0))
    assert cache.length == 0


# ---- what a cache makes of it ----


@every
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
def test_same_calls_same_blocks(recipe):
    assert recipe.arrival_dependent and not fixed(recipe).arrival_dependent
    x, caches = tensors(sum(STEPS)), [make(recipe), make(recipe)]
    for cache in caches:
        feed_in(cache, x, STEPS, query=anything)
    assert same(*map(state, caches))
    assert decisions(recipe, x, anything) != decisions(recipe, x, newest) != decisions(recipe, x, oldest)


def test_every_layer_and_row_has_a_say():
    """One row, or the last layer, that attends to the newest token alone outweighs the others, for all."""
    recipe = RECIPES["subkv-2bit"]
    x = tensors(sum(STEPS))
    last = x[2, 0].flatten(0, 1)

    def mildly(k_BTC, v_BTC):
        return oldest(k_BTC, v_BTC) / 1000

    def one_row(k_BTC, v_BTC):
        return torch.stack([newest(k_BTC, v_BTC)[0], mildly(k_BTC, v_BTC)[1]])

    def one_layer(k_BTC, v_BTC):
        own = bool((last == k_BTC[0, 0]).all(-1).any())
        return newest(k_BTC, v_BTC) if own else mildly(k_BTC, v_BTC)

    lets_go = decisions(recipe, x, newest)
    assert decisions(recipe, x, one_row) == decisions(recipe, x, one_layer) == lets_go
    assert decisions(recipe, x, mildly) == decisions(recipe, x, oldest) != lets_go


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


@pytest.mark.parametrize("recipe", ["subkv-2bit", "subkv-2bit-by-layer"], indirect=True)
def test_an_undone_pass_decides_as_before(recipe):
    """A pass that stops midway, one that is refused for a bad number, one whose layers come one by one."""
    x, wrong = tensors(sum(STEPS)), tensors(sum(STEPS), seed=9)
    cache, other = make(recipe), make(recipe)
    for number, size in enumerate(STEPS):
        start = cache.length
        stop = start + size
        feed(cache, wrong, start, stop, layers=range(1 + number % 2), query=oldest)
        broken = x.clone()
        broken[2, 1, 0, stop - 1, 7] = torch.nan
        with pytest.raises(ValueError, match="layer 2"):
            feed(cache, broken, start, stop, query=oldest)
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


@every
def test_reordered_rows_take_their_say_with_them(recipe):
    x, rows = tensors(sum(STEPS), rows=3), torch.tensor([2, 0, 0])
    real = torch.arange(x.shape[3]) >= torch.tensor([0, 3, 20])[:, None]
    cache, other = make(recipe), make(recipe)
    for number, size in enumerate(STEPS):
        if number % 5 == 0:
            cache.reorder(torch.tensor([1, 2, 0]))
            cache.reorder(torch.tensor([2, 0, 1]))
        feed_in(cache, x, [size], real_BT=real, query=anything)
        feed_in(other, x, [size], real_BT=real, query=anything)
    assert same(state(cache), state(other))
    cache.reorder(rows)
    found, expected = cache.policies[0].gaps, other.policies[0].gaps
    assert all(torch.equal(found[layer], expected[layer][rows]) for layer in range(3))


@pytest.mark.parametrize("recipe", ["subkv-2bit"], indirect=True)
def test_a_longer_window_is_billed(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x = tensors(recent + 8 * block)
    long, short = make(recipe), make(recipe)
    for _ in range(recent + 6 * block):
        feed_in(long, x, [1], query=oldest)
        feed_in(short, x, [1], query=newest)
        assert long.memory_report().total_bytes == sum(owned(long).values())
    more = long.memory_report().parts["window"] - short.memory_report().parts["window"]
    assert (
        more >= recipe.policy("window").blocks * block * 2 * 3 * 2 * 64 * 4
    )  # tokens, halves, layers, rows, channels, bytes
    feed_in(long, x, [1, 1], query=newest)  # it lets go at the second
    assert long.layers[0].blocks == short.layers[0].blocks
    assert long.memory_report().parts["window"] <= short.memory_report().parts["window"] + 6 * 2 * 64 * 64 * 4


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_papers(name):
    recipe, bits = preset(name), int(name[6])
    assert recipe.window == Window(1, 32, 32)
    assert (recipe.key.axis, recipe.value.axis) == ("channel", "token")
    for role in ("key", "value"):
        assert Codec(recipe, 0, role, GEOMETRY, {}).bits() == bits + 2 * 16 / 32
    assert recipe.widest.window.recent == 128
    assert not recipe.fitted and recipe.needs == {"attention"}


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("bits", [2, 4])
def test_rounding_is_kivis(bits, role):
    """Groups of 32 are the same groups in blocks of 32 and of 128."""
    x = tensors(128)[0, 0]
    kivi, subkv = (Codec(preset(f"{name}-{bits}bit"), 0, role, GEOMETRY, {}) for name in ("kivi", "subkv"))
    context = Context()
    whole = kivi.decode(kivi.encode(x, context), context)
    parts = [subkv.decode(subkv.encode(part, context), context) for part in x.split(32, 1)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_the_first_token_is_exact_and_the_second_is_not():
    x, cache = tensors(200), make(preset("subkv-2bit"))
    feed_in(cache, x, [150, 50])
    for layer, pair in enumerate(read(cache)):
        for role, out in enumerate(pair):
            assert torch.equal(out[:, 0], x[layer, role, :, 0])
            assert not torch.equal(out[:, 1], x[layer, role, :, 1])


def test_the_exact_window_is_at_most_128_and_a_block():
    x, cache = tensors(400), make(preset("subkv-2bit"))
    held = []
    for _ in range(400):
        feed_in(cache, x, [1], query=oldest)
        held.append(cache.layers[0].window_2BTC.shape[2])
    assert max(held) == 128 + 31


# ---- whole models ----


@pytest.mark.parametrize("way, name", together([*WAYS], ["subkv-2bit", "subkv-2bit-by-layer", "subkv-aqua-2bit"]))
def test_every_way_of_generating_works(name, way):
    model = random_model("llama", attention="kvq")
    ids = prompt(1 if way in ("lookup", "assisted") else 2)
    cache = kvq(name, model)
    replayed(model, ids, cache, kvq(name, model), way)
    stores, recipe = cache.blocks.layers.values(), cache.blocks.recipe
    most = recipe.widest.window.recent + recipe.window.block
    alike = len({store.blocks for store in stores}) == 1  # each layer may decide for itself
    assert (alike or name.endswith("by-layer")) and cache.blocks.reencoded == 0
    assert all(0 <= store.window_2BTC.shape[2] < most for store in stores)
    if way != "assisted":  # which crops to what was accepted
        assert cache.blocks.policies[0].gaps


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_four_bits_are_close_and_padded_rows_too(kind):
    model = random_model(kind, attention="kvq")
    ids, mask = padded(prompt(2, 120), 120, 71)
    found = []
    with torch.no_grad():
        for cache in (kvq("subkv-4bit", model, whole=True), stock(model)):
            model(ids[:, :100], attention_mask=mask[:, :100], past_key_values=cache)
            steps = [model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits
                     for t in range(100, 120)]  # fmt: skip
            found.append(torch.cat(steps, 1))
    assert 0 < float((found[0] - found[1]).norm() / found[1].norm()) < 0.35


def test_a_prompt_has_a_say():
    """The step after a prompt decides by the prompt's newest query."""
    model = random_model("llama", attention="kvq")
    cache = kvq("subkv-2bit", model, whole=True)
    with torch.no_grad():
        model(prompt(2, 63), past_key_values=cache)
        gaps = cache.blocks.policies[0].gaps.values()
        assert [gap_B.shape for gap_B in gaps] == [(2,)] * 3
        assert all(bool(gap_B.isfinite().all()) for gap_B in gaps)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_is_refused_by_name(attention):
    model = random_model("llama", attention=attention)
    message = rf"subkv-2bit needs attention, which {attention} attention does not hand out; call model.set_attn_impl"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        model(prompt(1), past_key_values=kvq("subkv-2bit", model))


def test_rope_that_varies_with_the_length_does_not_matter():
    dynamic = random_model("llama", "kvq", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert generate(dynamic, prompt(2), kvq("subkv-2bit", dynamic)).shape == (2, 80)
    with pytest.raises(ValueError, match="rope_type=dynamic changes with length"):
        kvq("subkv-aqua-2bit", dynamic)
