"""A cache made of an artifact keeps exact what is beyond the artifact's promise: if that is all, it loses nothing."""

import fitted
import pytest
import torch
from feeding import small
from generating import WAYS, generate
from models import prompt, random_model
from transformers import DynamicCache

from kvq_runtime import Artifact, KVQCache
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.hf.model import fingerprint_of, geometry_of

NAMES = ("mean-higgs-2bit", "aqua-2bit")


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def artifact_of(name: str, model, spread: float = 1e-9) -> Artifact:
    """Of random tensors, that promises next to no error at all."""
    geometry = geometry_of(model)
    recipe = small(read(name), geometry)
    stated = {"promise": {"spread": spread, "blocks": 8, "quantiles": [1.0] * 4}}
    fit = {"layers": [{"key": stated, "value": stated}] * geometry.layers}
    return Artifact(recipe, fingerprint_of(model), fitted.tensors(recipe, geometry), {}, fit)


@pytest.mark.parametrize("attention", ["kvq", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_all_beyond_generates_what_the_stock_cache_generates(name, attention):
    model, ids = random_model("llama"), prompt(2, 90)
    expected = {way: generate(model, ids, DynamicCache(), way) for way in ("greedy", "beams", "chunked")}
    model.set_attn_implementation(attention)
    made = artifact_of(name, model)
    for way, text in expected.items():
        cache = KVQCache.from_artifact(made, model)
        assert torch.equal(generate(model, ids, cache, way), text), way
        health = cache.health()
        assert health.beyond == health.blocks > 0


def test_every_way_goes_on_with_a_cache_that_keeps_some(model):
    made = artifact_of("mean-higgs-2bit", model, spread=14.0)
    for way in WAYS:
        cache = KVQCache.from_artifact(made, model)
        generate(model, prompt(1, 90), cache, way)
        assert 0 < cache.health().beyond < cache.health().blocks


def test_strict_stops_generation_and_an_artifact_without_a_promise(model):
    made = artifact_of("aqua-2bit", model)
    with pytest.raises(RuntimeError, match="calibration promised"):
        generate(model, prompt(1, 90), KVQCache.from_artifact(made, model, strict=True))
    older = Artifact(made.recipe, made.fingerprint, made.tensors, {}, {"layers": [{"key": 0.1}]})
    with pytest.raises(ValueError, match="aqua-2bit promises nothing"):
        KVQCache.from_artifact(older, model, strict=True)
    cache = KVQCache.from_artifact(older, model)
    generate(model, prompt(1, 90), cache)
    assert not cache.health().promised and not cache.health().blocks, (
        "measuring costs time, and is told against nothing"
    )


def test_a_recipe_is_measured_where_that_is_asked(model):
    recipe = small(read("kivi-2bit"), geometry_of(model))
    for health in (True, False):
        cache = KVQCache.from_recipe(recipe, model, health)
        generate(model, prompt(1, 90), cache)
        assert (cache.health().blocks > 0) == health
