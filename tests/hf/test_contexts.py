"""Ordinary ways of calling a model: mixed precision, and inference mode for a part of the passes."""

import sys

import pytest
import torch
from generating import generate, kvq, stock
from models import prompt, random_model
from tiers import some

PLAIN = ["exact", "kivi-2bit", "gear-2bit"]
WAYS = some(
    [("exact", "sdpa"), ("kivi-2bit", "kvq"), ("gear-2bit", "sdpa"), ("aqua-2bit", "kvq"), ("aqua-2bit", "sdpa"),
     ("h2o-higgs-2bit", "kvq"), ("subkv-2bit", "kvq"), ("svdq-online-2bit", "kvq")],
    ("kivi-2bit", "kvq"), ("aqua-2bit", "sdpa"), ("h2o-higgs-2bit", "kvq"),
)  # fmt: skip
CUTS = ((0, 140), (140, 141), (141, 160), (160, 161))


def logits(model, cache, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in CUTS], 1)


# ---- autocast ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_under_autocast_exact_is_the_stock_cache_and_holds_autocasts_dtype(attention):
    model, ids = random_model("qwen2", attention), prompt(2, 161)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = kvq("exact", model)
        assert torch.equal(logits(model, cache, ids), logits(model, stock(model), ids))
    assert cache.blocks.layers[0].buffer_2BTC.dtype == torch.bfloat16
    assert cache.blocks.layers[0].encoded > 0


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_autocast_are_those_of_the_same_keys_and_values(way):
    """Autocast rounds what the model multiplies, not what the cache does: the blocks are a bfloat16 cache's."""
    (name, attention), ids = way, prompt(2, 161)
    model = random_model("llama", attention)
    cache, plain, taken = kvq(name, model), kvq(name, model), []
    update = cache.layers[0].update

    def note(keys, values, *rest, **settings):
        taken.append((keys.to(values.dtype), values))
        return update(keys, values, *rest, **settings)

    cache.layers[0].update = note
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits(model, cache, ids)
    assert bool(found.isfinite().all()) and cache.get_seq_length() == 161
    assert {values.dtype for _, values in taken} == {torch.bfloat16}
    if name not in PLAIN:
        return
    for keys, values in taken:
        plain.blocks.update(0, *(x.transpose(1, 2).flatten(2) for x in (keys, values)))
        plain.blocks.step = None
    one, two = cache.blocks.layers[0], plain.blocks.layers[0]
    assert one.blocks == two.blocks > 0
    for role in (0, 1):
        for field, stored in one.fields(role, 0, one.blocks).items():
            assert torch.equal(stored, two.fields(role, 0, one.blocks)[field]), field


# ---- inference mode ----


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_in_inference_mode_is_continued_outside(way):
    (name, attention), ids = way, prompt(2, 161)
    model = random_model("llama", attention)
    with torch.no_grad():
        cache = kvq(name, model)
        expected = logits(model, cache, ids)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-1)
        again = model(ids[:, 160:], past_key_values=cache).logits
    with torch.inference_mode():
        cache = kvq(name, model)
        found = [model(ids[:, :140], past_key_values=cache).logits]
    with torch.no_grad():
        found += [model(ids[:, a:b], past_key_values=cache).logits for a, b in CUTS[1:3]]
    with torch.inference_mode():
        found += [model(ids[:, 160:], past_key_values=cache).logits]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-1)
    assert torch.equal(torch.cat(found, 1), expected)
    assert torch.equal(model(ids[:, 160:], past_key_values=cache).logits, again)  # with gradients on
    cache.reset()
    assert generate(model, ids[:, :60], cache).shape == (2, 100)


def forget_constants():
    """What a process has computed once, of settings, it computes anew."""
    for module in [module for place, module in sys.modules.items() if place.startswith("kvq_runtime.")]:
        for kept in vars(module).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


@pytest.mark.parametrize("name", some(["kivi-2bit", "higgs-2bit", "lloyd-4bit", "polar-3bit"], "higgs-2bit"))
def test_what_a_process_computes_once_in_inference_mode_is_for_passes_with_gradients(name):
    forget_constants()
    model, ids = random_model("llama", "kvq"), prompt(2, 161)
    with torch.inference_mode():
        expected = logits(model, kvq(name, model), ids)
    found = logits(model, kvq(name, model), ids)
    assert found.requires_grad and torch.equal(found, expected)


def test_an_artifact_of_inference_mode_is_held_once():
    model = random_model("llama")
    with torch.inference_mode():
        cache = kvq("aqua-2bit", model)
    held = [tensor for pair in cache.blocks.codecs for codec in pair for tensor in codec.tensors.values()]
    again = kvq("aqua-2bit", model)
    assert not any(tensor.is_inference() for tensor in held)
    assert cache.memory_report().shared_bytes == again.memory_report().shared_bytes
