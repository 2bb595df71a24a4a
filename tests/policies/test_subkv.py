"""SubKV: what it stores, what it leaves exact, and whole models under it."""

import pytest
import torch
from feeding import GEOMETRY, feed_in, make, oldest, read, tensors
from generating import WAYS, generate, kvq, padded, replayed, stock
from models import prompt, random_model
from tiers import together

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.recipe import Window, preset

NAMES = ["subkv-2bit", "subkv-3bit", "subkv-4bit"]


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
