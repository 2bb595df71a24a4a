"""Online fits: those of the same tokens offline, made once, of each row alone, before anything is encoded."""

from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, error, feed, feed_in, make, read, rotary, same, state, tensors
from models import prompt, random_model
from scheme_fit import chunks
from tiers import some
from torch import Tensor

from kvq_calib.fit.chunks import Blocks
from kvq_calib.fit.scheme import SchemeFit
from kvq_calib.fit.statistics import Moments, QueryMoments
from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.codec import Context
from kvq_runtime.codec.shared import RowCodec
from kvq_runtime.fit.fitting import fit_row
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.hf import KVQCache
from kvq_runtime.ops import rope
from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.recipes.subkv import DynamicWindow

# an online recipe, and the same one fitted offline
PAIRS = {
    "svdq-online-2bit": "svdq-2bit",
    "squat-online-2bit": "squat-2bit",
    "squat-online-2bit-paper": "squat-2bit-paper",
    "squat-pre-online-2bit": "squat-pre-2bit",
}
FIT = 256
ONLINE = ("polar-online", "squat-online-2bit", "squat-pre-online-2bit", "svdq-online-2bit")
every_online = pytest.mark.parametrize("name", some(ONLINE, "squat-online-2bit"))


def short(name: str, fit_tokens: int | str = "prompt") -> Recipe:
    """A window of 32, blocks of 32."""
    recipe = preset(name)
    window = replace(recipe.window, recent=32, block=32)
    return replace(recipe, window=window, policies=(PromptFit(fit_tokens),)).check(GEOMETRY)


def codecs(cache: BlockCache) -> dict[tuple[int, int], RowCodec]:
    found = {(n, role): store.codecs[role] for n, store in cache.layers.items() for role in (0, 1)}
    return {place: codec for place, codec in found.items() if isinstance(codec, RowCodec)}


def fits(cache: BlockCache) -> list[Tensor]:
    return [tensor for codec in codecs(cache).values() for tensor in codec.tensors]


def alike(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# ---- online is offline on these tokens ----


def offline(recipe: Recipe, x_LKBTC: Tensor) -> dict[str, Tensor]:
    """What calibration finds for the keys of layer 0 in the first row; queries as `feeding.newest` makes them."""
    k_NTC = x_LKBTC[0, 0, :1]
    tables = rotary().tables(torch.arange(k_NTC.shape[1])[None])
    q_NTC = 100 * k_NTC
    if recipe.position == "pre":
        k_NTC = rope.unrotate(k_NTC.unflatten(-1, (2, -1)), *tables).flatten(-2)
    sinks = recipe.window.sinks
    moments = Moments(GEOMETRY.width)
    moments.update(k_NTC[:, sinks:])
    fit = SchemeFit(recipe, 0, "key", GEOMETRY, Statistics(moments.value().mean_C.float()))
    total = QueryMoments(GEOMETRY)
    total.update(rope.unrotate(q_NTC.unflatten(-1, (2, -1)), *tables), tables)
    mask = (torch.arange(k_NTC.shape[1]) >= sinks)[None]
    data = Blocks(k_NTC, mask, tables, torch.zeros(1, dtype=torch.long))
    fit.fit(chunks([(data, Context())], total.value()))
    return fit.tensors


@pytest.mark.parametrize("name", PAIRS)
def test_an_online_fit_is_the_offline_fit_on_the_same_tokens(name):
    x, cache = tensors(FIT + 70), make(short(name, FIT))
    feed_in(cache, x, [FIT + 70])
    expected = offline(preset(PAIRS[name]), x[:, :, :, :FIT])
    found = codecs(cache)[0, 0].rows[0].tensors
    assert found.keys() == expected.keys()
    for field, tensor in found.items():
        assert error(tensor.float(), expected[field].float()) < 0.004, field  # of a bfloat16: the sums round otherwise


# ---- once, before anything is encoded, and for all that follows ----


@every_online
def test_nothing_is_encoded_before_the_tokens_of_the_fit_have_arrived(name):
    x, cache = tensors(FIT + 40), make(short(name, FIT))
    for size in (100, 100, FIT - 201):
        feed_in(cache, x, [size])
        assert not codecs(cache) and not any(store.encoded for store in cache.layers.values())
    assert torch.equal(read(cache)[2][0], x[2, 0, :, : FIT - 1])
    assert ("queries" in cache.recipe.needs) == bool(cache.memory_report().parts["queries"])
    feed_in(cache, x, [1])
    assert len(codecs(cache)) == 3 * sum(scheme.fitted for scheme in cache.recipe.at(0))
    assert cache.layers[2].encoded == FIT - 32 and not cache.memory_report().parts["queries"]


@every_online
def test_the_prompt_is_the_first_forward_pass_or_what_has_come_when_a_block_is_due(name):
    x, whole, pieces, fixed = tensors(FIT + 70), make(short(name)), make(short(name)), make(short(name, FIT))
    feed_in(whole, x, [FIT, 35, 35])
    feed_in(fixed, x, [FIT + 70])
    assert same(state(whole), state(fixed))
    feed_in(pieces, x, [40, 10])
    assert not codecs(pieces)
    feed_in(pieces, x, [FIT - 50, 70])
    assert same(state(pieces), state(whole))
    other = make(short(name))
    feed_in(other, x, [64, FIT + 6])  # the same tokens in other calls: another fit
    assert whole.recipe.arrival_dependent and not alike(fits(other), fits(whole))
    assert whole.layers[0].encoded == other.layers[0].encoded == FIT + 32


@every_online
def test_later_tokens_are_encoded_with_the_fit_of_the_prompt(name):
    """Each block is what the fitted codec of its row makes of its tokens, those that came one by one included."""
    x, cache = tensors(FIT + 64), make(short(name))
    feed_in(cache, x, [FIT])
    before = [tensor.clone() for tensor in fits(cache)]
    feed_in(cache, x, [1] * 64)
    assert alike(before, fits(cache))
    for (layer, role), codec in codecs(cache).items():
        store = cache.layers[layer]
        last = slice(store.encoded - 32, store.encoded)
        block = x[layer, role, :, last]
        if role == 0 and cache.recipe.position == "pre":
            tables = rotary().tables(torch.arange(FIT + 64)[None, last])
            block = rope.unrotate(block.unflatten(-1, (2, -1)), *tables).flatten(-2)
        stored = store.fields(role, store.blocks - 1, store.blocks)
        for index, own in enumerate(codec.rows):
            made = own.encode(block[index : index + 1], Context())
            assert all(torch.equal(made[field][0], stored[field][index, 0]) for field in made)
    for pair in read(cache):
        wrong = (pair[0] - x[0, 0]).norm(dim=-1)[:, FIT : FIT + 32]
        assert bool((wrong > 0).all())


# ---- rows, padding, and what is undone ----


@every_online
def test_a_row_does_not_depend_on_the_others(name):
    x, cache = tensors(FIT + 40, rows=3), make(short(name))
    feed_in(cache, x, [FIT, 40])
    for index in range(3):
        alone = make(short(name))
        feed_in(alone, x[:, :, index : index + 1], [FIT, 40])
        for together, own in zip(state(cache), state(alone), strict=True):
            assert all(torch.equal(together[field][index : index + 1], own[field]) for field in own)
    cache.reorder(torch.tensor([2, 0, 2]))
    other = make(short(name))
    feed_in(other, x[:, :, [2, 0, 2]], [FIT, 40])
    assert same(state(cache), state(other)) and alike(fits(cache), fits(other))
    saved = other.memory_report().parts["fitted"] - cache.memory_report().parts["fitted"]
    assert saved == other.memory_report().parts["fitted"] // 3  # a row that is there twice has one fit


NAMES = ["squat-pre-online-2bit", "svdq-online-2bit", "polar-online"]


@pytest.mark.parametrize("name", some(NAMES, "squat-pre-online-2bit"))
def test_padding_and_sinks_have_no_part_in_the_fit(name):
    x = tensors(FIT, rows=2)
    real = torch.arange(FIT) >= torch.tensor([0, 100])[:, None]
    cache, other = make(short(name)), make(short(name))
    feed_in(cache, x.where(real[..., None], 1e4), [FIT], real_BT=real)
    shifted = x[:, :, 1:, 100:]
    feed_in(other, shifted, [FIT - 100])
    for place, codec in codecs(cache).items():
        assert alike(RowCodec(codec.rows[1:]).tensors, codecs(other)[place].tensors)
    sinks = cache.recipe.window.sinks
    if sinks and "queries" not in cache.recipe.needs:
        loud = shifted.clone()
        loud[:, :, :, :sinks] = 1e4
        again = make(short(name))
        feed_in(again, loud, [FIT - 100])
        assert alike(fits(again), fits(other))
    waiting = make(short(name, 50))
    feed_in(waiting, x[..., :140, :], [140], real_BT=real[:, :140])  # the second row has 40
    assert not codecs(waiting)


@pytest.mark.parametrize("name", some(["squat-online-2bit", "svdq-online-2bit"], "svdq-online-2bit"))
def test_a_forward_pass_that_fails_takes_its_fit_with_it(name):
    x, cache, other = tensors(200), make(short(name)), make(short(name))
    feed_in(cache, x, [50])
    bad = x.clone()
    bad[2, 1, 0, 150] = torch.nan
    with pytest.raises(ValueError, match="layer 2"):
        feed(cache, bad, 50, 200)
    assert cache.length == 50 and not codecs(cache)
    feed_in(cache, x, [100, 50])
    feed_in(other, x, [50, 100, 50])
    assert same(state(cache), state(other)) and alike(fits(cache), fits(other))


# ---- recipes ----


@pytest.mark.parametrize(
    "base, changes, said",
    [
        ("higgs-2bit", {}, "nothing is fitted"),
        ("aqua-2bit", {}, "linear needs calibration"),
        ("kvquant-3bit", {}, "needs calibration"),
        ("svdq-wf-2bit-v4", {}, "differ by row"),
        ("squat-2bit", {"policies": (PromptFit(), DynamicWindow())}, "does not wait"),
    ],
)
def test_what_cannot_be_fitted_online_is_refused(base, changes, said):
    with pytest.raises(ValueError, match=said):
        replace(preset(base), **{"policies": (PromptFit(),)} | changes).check()


# ---- under transformers ----


def test_a_model_hands_its_queries_to_the_fit():
    """The moves against those of queries recomputed from the prompt; under any other attention the recipe refuses."""
    model, ids = random_model("llama", "sdpa"), prompt(2, 200)
    recipe = preset("squat-pre-online-2bit")
    with pytest.raises(RuntimeError, match="needs queries"):
        model(ids, past_key_values=KVQCache.from_recipe(recipe, model))
    seen: list[Tensor] = []
    attention = model.get_decoder().layers[1].self_attn
    hook = attention.q_proj.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    model.set_attn_implementation("kvq")
    window = replace(recipe.window, recent=32, block=32)
    cache = KVQCache.from_recipe(replace(recipe, window=window), model)
    with torch.no_grad():
        out = model.generate(ids, past_key_values=cache, max_new_tokens=50, do_sample=False, pad_token_id=1)
    hook.remove()
    assert out.shape[1] == 250 and cache.blocks.layers[0].encoded == 192
    fitted = cache.blocks.layers[1].codecs[0]
    assert isinstance(fitted, RowCodec)
    geometry = cache.blocks.geometry
    for index, codec in enumerate(fitted.rows):
        unused = torch.ones(1, geometry.width)
        expected = fit_row(cache.blocks.recipe, 1, "key", geometry, unused, {"before": seen[0][index]}.__getitem__)
        for field, tensor in codec.tensors.items():
            assert error(tensor.float(), expected.tensors[field].float()) < 0.01, field


def test_a_row_has_a_block_of_tokens_at_least_before_it_is_fitted():
    assert PromptFit().enough(sinks=4, block=128) == 128 and PromptFit().enough(sinks=200, block=128) == 201
    assert PromptFit(fit_tokens=300).enough(sinks=4, block=128) == 300
