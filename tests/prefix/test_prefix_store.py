"""A model goes on from a kept prefix as if nothing had happened between; equal tokens with other keys find nothing."""

from itertools import pairwise

import accelerate
import architectures
import fitted
import pytest
import torch
from feeding import small
from models import SHAPE, YARN, prompt, random_model
from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration, MistralConfig, MistralForCausalLM

from kvq_runtime import KVQCache, PrefixStore, preset
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.hf import fingerprint_of, geometry_of
from kvq_runtime.hf.model import CACHE
from kvq_runtime.prefix.transformers import weights_digest
from kvq_runtime.recipe import Recipe

NEW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def recipe_of(name: str, model) -> Recipe:
    """A recipe with blocks of a few tokens."""
    return small(preset(name), geometry_of(model))


def answer(store: PrefixStore, ids: torch.Tensor, **settings) -> torch.Tensor:
    """Load, generate and keep."""
    cache = store.load(ids)
    out = store.model.generate(ids, **{CACHE: cache}, **NEW, **settings)
    store.put(cache, out[0])
    return out


def test_an_exact_prefix_gives_the_same_answer_after_a_restart(tmp_path, model):
    recipe, ids = recipe_of("exact", model), prompt(1, 90)
    expected = model.generate(ids, **NEW)
    assert torch.equal(answer(PrefixStore(tmp_path, recipe, model), ids), expected)
    again = PrefixStore(tmp_path, recipe, model)
    assert again.load(iter(ids[0].tolist())).get_seq_length() == (90 - recipe.window.recent) // 16 * 16 > 60
    assert torch.equal(answer(again, ids), expected)
    longer = torch.cat([expected, prompt(1, 20, seed=1)], 1)  # the next turn finds prompt and answer
    assert again.load(longer).get_seq_length() == 80
    assert torch.equal(answer(again, longer), model.generate(longer, **NEW))
    assert torch.equal(answer(again, longer, prompt_lookup_num_tokens=4), model.generate(longer, **NEW))


def test_an_artifact_of_this_model_is_kept_and_of_another_refused(tmp_path, model):
    recipe, ids = recipe_of("aqua-2bit", model), prompt(1, 90)
    made = Artifact(recipe, fingerprint_of(model), fitted.tensors(recipe, geometry_of(model)), {}, {})
    store = PrefixStore(tmp_path, made, model)
    cache = store.load(ids)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    assert store.put(cache, ids) == 64 == PrefixStore(tmp_path, made, model).load(ids).get_seq_length()
    with pytest.raises(ArtifactError, match="fingerprint"):
        PrefixStore(tmp_path, made, random_model(seed=1))


def test_beams_keep_the_prompt(tmp_path, model):
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model), prompt(1, 50)
    expected, cache = model.generate(ids, num_beams=3, **NEW), store.load(ids)
    assert torch.equal(model.generate(ids, num_beams=3, **{CACHE: cache}, **NEW), expected)
    assert store.put(cache, ids) == 32
    cache = store.load(ids)
    cache.reorder_cache(torch.zeros(3, dtype=torch.long))
    assert torch.equal(model.generate(ids, num_beams=3, **{CACHE: cache}, **NEW), expected)


def test_weights_that_change_are_another_model(tmp_path):
    """Also where neither keys nor values of the first layer follow from them; back again, all is found."""
    model, ids = random_model(), prompt(1, 90)
    store = PrefixStore(tmp_path, recipe_of("exact", model), model)
    answer(store, ids)
    weight = model.model.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    weight.data.mul_(1.5)  # as an adapter is merged: no version of the parameter counts it
    with pytest.raises(ValueError, match="weights, or its adapters in use"):
        store.load(ids)
    again = PrefixStore(tmp_path, recipe_of("exact", model), model)
    assert again.load(ids).get_seq_length() == 0
    assert torch.equal(answer(again, ids), model.generate(ids, **NEW))
    weight.data.copy_(before)
    assert store.load(ids).get_seq_length() > 0


def test_what_keys_and_values_depend_on_is_told_apart():
    """Adapters in use, their scaling and merging, saved buffers, RoPE in use, a quantization at load time."""
    model, digests = random_model(), set()
    layer = model.model.layers[0].mlp.down_proj
    digests.add(weights_digest(model))
    layer.active_adapters, layer.disable_adapters = ["one"], False  # as PEFT's layers have it
    digests.add(weights_digest(model))
    layer.disable_adapters = True
    digests.add(weights_digest(model))
    layer.register_buffer("qweight", torch.arange(1 << 12, dtype=torch.int32) + (1 << 28))  # as GPTQ's have it
    digests.add(weights_digest(model))
    layer.qweight += 1
    digests.add(weights_digest(model))
    for scaling in (2.0, 8.0, 2.0):
        layer.scaling, layer.r = {"one": scaling}, {"one": 4}
        digests.add(weights_digest(model))
    layer.merged_adapters = ["one"]
    digests.add(weights_digest(model))
    model.model.rotary_emb.inv_freq.mul_(0.5)  # which is no saved buffer
    digests.add(weights_digest(model))
    model.config.quantization_config = {"load_in_8bit": True}
    digests.add(weights_digest(model))
    layer.register_buffer("scratch", torch.ones(3), persistent=False)
    assert len(digests) == 10 and weights_digest(model) in digests


def test_weights_that_accelerate_offloads_are_read_where_it_keeps_them(tmp_path):
    model = random_model()
    digest = weights_digest(model)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert model.model.layers[0].self_attn.k_proj.weight.is_meta and weights_digest(model) == digest


@pytest.mark.filterwarnings("ignore:.*is not a family")
def test_of_a_prompt_with_an_image_the_text_before_it_is_kept(tmp_path):
    towers = {"vision_config": AutoConfig.for_model("clip_vision_model", **architectures.SEEING)}
    config = LlavaConfig(
        text_config=AutoConfig.for_model("llama", **SHAPE), **towers, image_token_id=96,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model), prompt(1, 90).clamp(max=95)
    ids[0, 40:44] = 96
    for seed in (0, 1):
        image = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
        expected = model.generate(ids, pixel_values=image, **NEW)
        assert torch.equal(answer(store, ids, pixel_values=image), expected)
        assert store.load(ids).get_seq_length() == 32


@pytest.mark.parametrize("name", ["higgs-2bit", "exact-pre"])
def test_positions_that_do_not_count_from_0_are_refused(name, tmp_path):
    model, ids = random_model(), prompt(1, 90)
    recipe = recipe_of(name, model)
    store, cache = PrefixStore(tmp_path, recipe, model), KVQCache.from_recipe(recipe, model)
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
    assert store.put(cache, ids) == 64


def test_models_recipes_and_caches_that_cannot_be_kept_are_refused(tmp_path, model):
    settings = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    with pytest.raises(ValueError, match="rope_type=dynamic rotates keys by the length"):
        PrefixStore(tmp_path, "higgs-2bit", random_model(rope_parameters=settings))
    PrefixStore(tmp_path, "higgs-2bit", random_model(rope_parameters=YARN))
    config = MistralConfig(**model.config.to_dict() | {"sliding_window": 16, "model_type": "mistral"})
    with pytest.raises(ValueError, match="attend"):
        PrefixStore(tmp_path, "exact", MistralForCausalLM(config))
    with pytest.raises(ValueError, match="as they arrive"):
        PrefixStore(tmp_path, "subkv-2bit", model)
    with pytest.raises(TypeError, match="salt is of type int; give a text"):
        PrefixStore(tmp_path, "exact", model, salt=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Recipe"):
        PrefixStore(tmp_path, 3, model)  # type: ignore[arg-type]
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model), prompt(1, 50)
    with pytest.raises(ValueError, match="the store of exact"):
        store.put(KVQCache.from_recipe("higgs-2bit", model), ids)
    with pytest.raises(ValueError, match="one row"):
        store.load(ids.expand(2, -1))
