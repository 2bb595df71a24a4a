"""Our attention against transformers' sdpa over the same cache's decoded keys and values: two roads to one result."""

import pytest
import torch
from feeding import GEOMETRY, RECIPES, error, every_recipe, feed_in, make, rotary, tensors, turned
from generating import WAYS, generate, kvq, padded, stock
from models import prompt, random_model
from tiers import some
from torch.nn.functional import scaled_dot_product_attention

from kvq_runtime.attention.path import Query, Reference, newest_weights
from kvq_runtime.ops.dense import Softmax
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.rtn import Rtn

GROUP = 3  # query heads per KV head


def both(recipe, sizes, new: int, real_BT=None, rows=2, cap=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What attention to a cache filled in passes of `sizes` gives for `new` more tokens: (ours, sdpa's) by layer."""
    total = sum(sizes) + new
    x = turned(tensors(total, rows))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(GEOMETRY.layers, rows, GROUP * GEOMETRY.kv_heads, new, GEOMETRY.head_size, generator=generator)
    mask = torch.ones(new, total, dtype=torch.bool).tril(total - new).expand(rows, 1, -1, -1)
    if real_BT is not None:
        mask = mask & real_BT[:, None, None]
    ours, decoded = make(recipe), make(recipe)
    for cache in (ours, decoded):
        feed_in(cache, x, sizes, real_BT=real_BT)
    found = []
    read = feed_in(decoded, x, [new], real_BT=real_BT)[0]
    positions = torch.arange(total - new, total)[None]
    if real_BT is not None:
        positions = (real_BT.cumsum(1) - 1).clamp(min=0)[:, -new:]
    ours.positions.announce(None if real_BT is None else real_BT[:, -new:], positions, rotary())
    for layer, pair in enumerate(read):
        keys, values = (t.unflatten(-1, (GEOMETRY.kv_heads, -1)).transpose(1, 2) for t in pair)
        expected = scaled_dot_product_attention(q[layer], keys, values, attn_mask=mask, enable_gqa=True)
        if cap is not None:
            s = q[layer] @ keys.repeat_interleave(GROUP, 1).mT * GEOMETRY.head_size**-0.5
            p = (cap * torch.tanh(s / cap)).masked_fill(~mask, -torch.inf).softmax(-1)
            expected = p @ values.repeat_interleave(GROUP, 1)
        ours.take(layer, *x[layer, :, :, -new:].unbind(0))
        seen = None if real_BT is None else mask
        out = ours.attend(layer, q[layer], seen, GEOMETRY.head_size**-0.5, Softmax(cap))
        ours.finish(layer)
        found.append((out, expected))
    assert [store.blocks for store in ours.layers.values()] == [store.blocks for store in decoded.layers.values()]
    return found


@every_recipe
@pytest.mark.parametrize("new", [1, 7])
def test_attention_is_that_over_the_decoded_tokens(recipe, new):
    for out, expected in both(recipe, [recipe.window.block * 2 + recipe.window.recent + 9, 1], new):
        assert error(out, expected) < 6e-3  # sdpa's road rounds rotated keys and values to bfloat16


@pytest.mark.parametrize("name", ["kivi-2bit", "polar-3bit", "aqua-2bit"])
def test_capped_scores(name):
    """Most scores come near the cap."""
    recipe = RECIPES[name]
    for out, expected in both(recipe, [recipe.window.block * 2 + recipe.window.recent + 9, 1], 1, cap=1.0):
        assert error(out, expected) < 6e-3


def test_the_newest_weights_are_those_of_attention():
    """Under a cap too: as a path without weights tells them from its levels."""
    recipe, cap, seen = RECIPES["kivi-2bit"], 1.0, []
    cache = make(recipe)
    feed_in(cache, tensors(90, 2), [90])
    q_BHTD = torch.randn(2, GROUP * GEOMETRY.kv_heads, 1, GEOMETRY.head_size)
    road = Reference(cache.decoder, lambda store, p_BHGTT, slots: seen.append(p_BHGTT))
    road.levels = True
    query = Query(cache.layers[0], q_BHTD, None, 0.2, cap)
    attended = road.attend(query)
    told = newest_weights(query, attended.lse_BHT)
    torch.testing.assert_close(told, seen[0][..., -told.shape[-1] :])


@pytest.mark.parametrize("blocks, sinks", [(1, 24), (3, 24), (40, 4), (40, 0)])
def test_sinks_may_lie_in_several_blocks_and_blocks_in_several_slabs(blocks, sinks):
    recipe = Recipe("any", Scheme(Rtn()), Scheme(Rtn()), window=Window(sinks, 8, 16))
    for out, expected in both(recipe, [16 * blocks + 12], 1, rows=1):
        assert error(out, expected) < 1e-5


@pytest.mark.parametrize("name", ["exact", "rtn-2bit", "kivi-2bit", "higgs-head-2bit", "aqua-2bit"])
@pytest.mark.parametrize("case", some([(3, 1), (30, 1), (30, 7)], (30, 7)))
def test_padded_rows_see_their_own_tokens_only(name, case):
    short, new = case
    recipe = RECIPES[name]
    total = recipe.window.block * 2 + recipe.window.recent + 10
    real = torch.arange(total) >= torch.tensor([total - short, 0])[:, None]
    for out, expected in both(recipe, [total - 4 - new, 4], new, real):
        assert error(out, expected) < 6e-3


@pytest.mark.parametrize("name", ["rtn-2bit", "rtn-8bit", "higgs-2bit", "turboquant-3bit", "kivi-2bit"])
def test_plain_codes_are_never_decoded(name):
    cache = make(RECIPES[name])
    x = tensors(200)
    cache.positions.announce(None, torch.arange(200)[None], rotary())
    for layer in range(GEOMETRY.layers):
        cache.take(layer, *x[layer].unbind(0))
        cache.finish(layer)
    assert cache.layers[0].blocks > 0
    cache.attend(0, torch.randn(2, 4, 1, GEOMETRY.head_size), None, 0.1)
    assert cache.decoder.scratch_peak == 0
    assert all(codec.packed_reader for codec in cache.layers[0].codecs)


def test_what_turns_or_is_predicted_is_decoded():
    for name in ("aqua-2bit", "mean-higgs-2bit", "exact"):
        assert all(codec.packed_reader is None for codec in make(RECIPES[name]).codecs[0])


def test_many_queries_in_slices(monkeypatch):
    whole = both(RECIPES["rtn-4bit"], [150], 70)
    monkeypatch.setattr("kvq_runtime.attention.path.SCORES", 10_000)
    for (out, _), (sliced, expected) in zip(whole, both(RECIPES["rtn-4bit"], [150], 70), strict=True):
        assert error(sliced, out) < 1e-6
        assert error(sliced, expected) < 1e-5


@pytest.mark.parametrize("way", some(WAYS, "beams"))
def test_exact_generates_what_the_stock_cache_does(way):
    model = random_model("llama")
    ids = prompt(rows=1 if way in ("lookup", "assisted") else 2)
    expected = generate(model, ids, stock(model), way)
    model.set_attn_implementation("kvq")
    assert torch.equal(generate(model, ids, kvq("exact", model), way), expected)


def test_left_padding():
    model = random_model("qwen2")
    ids, mask = padded(prompt(2, 60), 60, 23)
    expected = generate(model, ids, stock(model), attention_mask=mask)
    model.set_attn_implementation("kvq")
    assert torch.equal(generate(model, ids, kvq("exact", model), attention_mask=mask), expected)


def test_a_pass_that_fails_in_attention_is_undone():
    model = random_model("llama", attention="kvq")
    cache = kvq("rtn-4bit", model)
    ids = prompt(1, 60)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        held = model(ids[:, :1], past_key_values=cache).logits
        cache.crop(-1)

        def fail(module, args, kwargs):
            raise KeyboardInterrupt

        handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail, with_kwargs=True)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == 60
        assert torch.equal(model(ids[:, :1], past_key_values=cache).logits, held)
