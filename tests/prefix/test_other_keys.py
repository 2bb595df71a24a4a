"""Equal tokens of which keys and values differ: nothing that was kept of some is found for the others."""

from itertools import pairwise

import accelerate
import architectures
import pytest
import torch
from feeding import small
from models import SHAPE, YARN, prompt, random_model
from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration

from kvq_runtime import KVQCache, PrefixStore, preset
from kvq_runtime.hf import geometry_of
from kvq_runtime.hf.model import CACHE
from kvq_runtime.hf.prefix import weights_digest

NEW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}


def recipe_of(name: str, model):
    return small(preset(name), geometry_of(model))


@pytest.mark.parametrize("name", ["higgs-2bit", "exact-pre"])
def test_positions_that_do_not_count_from_0_are_refused_whatever_the_recipe(name):
    model, ids = random_model(), prompt(1, 90)
    recipe = recipe_of(name, model)
    store, cache = PrefixStore(None, recipe, model=model), KVQCache.from_recipe(recipe, model)
    places = torch.arange(90)[None]
    for given in (places + 200, torch.cat([places[:, :89], places[:, :1] + 300], 1)):
        for cuts in ((0, 90), (0, 89, 90)):
            cache.reset()
            with torch.no_grad():
                for start, stop in pairwise(cuts):
                    model(ids[:, start:stop], position_ids=given[:, start:stop], **{CACHE: cache})
            with pytest.raises(ValueError, match="positions that do not count from 0"):
                store.put(cache, ids)
    cache.crop(-90)
    with torch.no_grad():
        model(ids, position_ids=places, **{CACHE: cache})
    assert store.put(cache, ids) == 80


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_of_the_text_are_refused(kind):
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16} if kind == "longrope" else {}
    model = random_model(rope_parameters=settings | factors)
    with pytest.raises(ValueError, match=f"rope_type={kind} turns keys by the length"):
        PrefixStore(None, "higgs-2bit", model=model)
    PrefixStore(None, "higgs-2bit", model=random_model(rope_parameters=YARN))


def test_tokens_may_come_from_an_iterator():
    model, ids = random_model(), prompt(1, 90)
    store = PrefixStore(None, recipe_of("exact", model), model=model)
    store.generate(ids, **NEW)
    of_list = store.load(ids, recent=0).get_seq_length()
    assert store.load(iter(ids[0].tolist()), recent=0).get_seq_length() == of_list > 0


def test_weights_that_change_are_another_model():
    model, ids = random_model(), prompt(1, 90)
    store = PrefixStore(None, recipe_of("exact", model), model=model)
    store.generate(ids, **NEW)
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = weight.detach().clone()
    weight.data.mul_(1.5)  # as an adapter is merged: no version of the parameter counts it
    for call in (store.load, store.longest, lambda ids: store.generate(ids, **NEW)):
        with pytest.raises(ValueError, match="weights, or its adapters in use"):
            call(ids)
    again = PrefixStore(None, recipe_of("exact", model), model=model)
    assert torch.equal(again.generate(ids, **NEW), model.generate(ids, **NEW))
    weight.data.copy_(before)
    assert store.longest(ids) == 80


def test_adapters_in_use_and_saved_buffers_are_told_apart():
    model, ids = random_model(), prompt(1, 90)
    layer = model.model.layers[0].mlp.down_proj
    seen = {weights_digest(model)}
    layer.active_adapters, layer.disable_adapters = ["one"], False  # as PEFT's layers have it
    store = PrefixStore(None, "higgs-2bit", model=model)
    seen.add(weights_digest(model))
    layer.disable_adapters = True
    seen.add(weights_digest(model))
    with pytest.raises(ValueError, match="adapters in use"):
        store.load(ids)
    layer.register_buffer("qweight", torch.arange(1 << 12, dtype=torch.int32) + (1 << 28))  # as GPTQ's have it
    seen.add(weights_digest(model))
    layer.qweight += 1
    seen.add(weights_digest(model))
    layer.register_buffer("scratch", torch.ones(3), persistent=False)
    assert len(seen) == 5 and weights_digest(model) in seen


@pytest.mark.filterwarnings("ignore:.*is not a family")
def test_of_a_prompt_with_an_image_what_precedes_it_is_kept():
    towers = {"vision_config": AutoConfig.for_model("clip_vision_model", **architectures.SEEING)}
    config = LlavaConfig(
        text_config=AutoConfig.for_model("llama", **SHAPE), **towers, image_token_id=96,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    store, ids = PrefixStore(None, recipe_of("exact", model), model=model), prompt(1, 90).clamp(max=95)
    ids[0, 40:44] = 96
    for seed in (0, 1):
        image = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
        expected = model.generate(ids, pixel_values=image, **NEW)
        assert torch.equal(store.generate(ids, pixel_values=image, **NEW), expected)
        assert store.longest(ids) == store.load(ids).get_seq_length() == 32


def test_weights_that_accelerate_offloads_are_found_where_it_keeps_them(tmp_path):
    model, ids = random_model(), prompt(1, 60)
    expected, digest = model.generate(ids, **NEW), weights_digest(model)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert model.model.layers[0].self_attn.k_proj.weight.is_meta
    store = PrefixStore(None, recipe_of("exact", model), model=model)
    assert weights_digest(model) == digest and torch.equal(store.generate(ids, **NEW), expected)
