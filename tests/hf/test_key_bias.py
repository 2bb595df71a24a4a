"""A bias of k_proj far larger than what differs between tokens, as Qwen2's, is subtracted before keys are encoded."""

import pytest
import torch
from transformers import DynamicCache

from kvq_runtime.artifact import recipe_text
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.predict import Bias, Mean
from kvq_runtime.vllm.served_recipe import Shard
from tests.support.models import prompt, random_model

RECIPES = ("higgs-4bit", "quarot-head-4bit", "lloyd-4bit", "rtn-4bit", "kivi-4bit", "polar-3bit")
SETTINGS = "+window.sinks=0+window.recent=0"


def biased(kind: str = "qwen2", size: float = 60.0):
    """A model whose keys have biases of norms in the hundreds."""
    model = random_model(kind)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, size)
    return model


@torch.no_grad()
def key_error(cache: KVQCache, model) -> float:
    """Largest relative error, over layers, of decoded keys: of what differs between tokens."""
    exact, ids = DynamicCache(), prompt(1, 256)
    model(ids, past_key_values=exact)
    model(ids, past_key_values=cache)
    worst = 0.0
    for n in range(len(exact.layers)):
        k_BHTD = exact.layers[n].keys
        turned = model.model.rotary_emb(k_BHTD, torch.arange(256)[None])
        bias_HD = model.model.layers[n].self_attn.k_proj.bias.view(k_BHTD.shape[1], 1, -1)
        half = bias_HD.shape[-1] // 2
        swapped = torch.cat([-bias_HD[..., half:], bias_HD[..., :half]], -1)
        own = k_BHTD[0] - (bias_HD * turned[0] + swapped * turned[1])
        decoded = cache.blocks.decoder.whole(n)[0][0].unflatten(-1, (k_BHTD.shape[1], -1)).transpose(0, 1)
        worst = max(worst, float((decoded - k_BHTD[0])[:, :192].norm() / own[:, :192].norm()))
    return worst


@pytest.mark.parametrize("name", RECIPES)
def test_keys_lose_what_the_bits_say(name):
    model = biased()
    small = key_error(KVQCache.from_recipe(name + SETTINGS, model), model)
    kept = key_error(KVQCache.from_recipe(f"{name}{SETTINGS}+key_bias=kept", model), model)
    assert small < 0.35
    assert kept > 3 * small or name == "kivi-4bit"  # whose ranges are of single channels


def test_only_a_bias_is_subtracted():
    for kind in ("llama", "qwen3"):
        assert KVQCache.from_recipe("higgs-4bit", random_model(kind)).blocks.recipe.key.predict is None
    model = biased()
    assert KVQCache.from_recipe("exact", model).blocks.recipe.key.predict is None
    recipe = KVQCache.from_recipe("higgs-4bit", model).blocks.recipe
    assert recipe.key.predict == Bias() and recipe.value.predict is None and recipe.name == "higgs-4bit"
    online = KVQCache.from_recipe("squat-pre-online-2bit+window.recent=0", model)
    model.set_attn_implementation("kvq")
    with torch.no_grad():
        model(prompt(1, 200), past_key_values=online)
    assert online.blocks.recipe.key.predict == Mean() and online.blocks.layers[0].encoded


def test_the_setting_is_in_json_only_where_it_is_not_the_default():
    kept = recipe_text.read("higgs-4bit+key_bias=kept")
    assert kept.to_json()["key_bias"] == "kept" and Recipe.from_json(kept.to_json()) == kept
    assert "key_bias" not in recipe_text.read("higgs-4bit").to_json()
    with pytest.raises(ValueError, match="removed"):
        recipe_text.read("higgs-4bit+key_bias=gone")


def test_a_cache_is_none_the_slower_to_copy_and_answers_alike(tmp_path):
    model = biased()
    cache = KVQCache.from_recipe("higgs-4bit" + SETTINGS, model)
    with torch.no_grad():
        model(prompt(1, 130), past_key_values=cache)
    torch.save(cache, tmp_path / "cache.pt")
    other = torch.load(tmp_path / "cache.pt", weights_only=False)
    step = prompt(1, 1)
    with torch.no_grad():
        torch.testing.assert_close(model(step, past_key_values=other).logits, model(step, past_key_values=cache).logits)


def test_a_worker_takes_the_bias_of_its_heads():
    cache = KVQCache.from_recipe("rtn-4bit", biased())
    codecs, geometry = cache.blocks.codecs, cache.blocks.geometry
    tensors = {f"layers.{n}.key.{name}": x for n, (key, _) in enumerate(codecs) for name, x in key.tensors.items()}
    second = Shard(1, 2).tensors(cache.blocks.recipe, geometry, tensors)
    torch.testing.assert_close(second["layers.0.key.predict.mean"], codecs[0][0].centre[geometry.width // 2 :])


@pytest.mark.parametrize(
    ("name", "warns"), [("higgs-4bit+key_bias=kept", True), ("higgs-4bit", False), ("kivi-4bit", False)]
)
def test_a_collapse_is_logged_once(name, warns, caplog):
    model = biased()
    cache = KVQCache.from_recipe(name + SETTINGS, model)
    with torch.no_grad():
        for _ in range(2):
            model(prompt(1, 200), past_key_values=cache)
    said = [record.message for record in caplog.records if "do not trust" in record.message]
    assert len(said) == warns
    assert not warns or ("layer" in said[0] and "kivi-4bit" in said[0])


def test_no_sane_model_is_said_to_collapse(caplog):
    for name in ("higgs-2bit", "kivi-2bit", "rtn-2bit", "higgs-4bit"):
        cache = KVQCache.from_recipe(name + SETTINGS, model := random_model())
        with torch.no_grad():
            model(prompt(1, 200), past_key_values=cache)
    assert not caplog.records
