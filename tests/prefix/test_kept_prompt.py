"""A model goes on from a kept prefix as if nothing had happened between."""

import errno
import os
import re

import fitted
import pytest
import torch
from feeding import small
from models import random_model
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from kvq_runtime import KVQCache, PrefixStore, preset
from kvq_runtime.hf import geometry_of
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix.block_folder import Folder
from kvq_runtime.prefix.store import PrefixBlocks

NEW = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def recipe_of(name: str, model):
    """A recipe with blocks of a few tokens."""
    return small(preset(name), geometry_of(model))


def prompt(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def test_an_exact_prefix_gives_the_same_answer_after_a_restart(tmp_path, model):
    recipe, ids = recipe_of("exact", model), prompt(90)
    expected = model.generate(ids, **NEW)
    assert torch.equal(PrefixStore(tmp_path, recipe, model=model).generate(ids, **NEW), expected)
    again = PrefixStore(tmp_path, recipe, model=model)
    cache = again.load(ids)
    assert cache.get_seq_length() == (90 - recipe.window.recent) // 16 * 16 > 60
    assert torch.equal(model.generate(ids, past_key_values=cache, **NEW), expected)
    assert torch.equal(model.generate(ids, past_key_values=again.load_decoded(ids), **NEW), expected)
    longer = torch.cat([expected, prompt(20, 1)], 1)  # the next turn finds prompt and answer
    assert again.load(longer, recent=0).get_seq_length() == 96
    assert torch.equal(again.generate(longer, **NEW), model.generate(longer, **NEW))
    assert again.longest(longer) == 112
    assert re.fullmatch(rf"PrefixStore\(exact, \S+ \S+ in {tmp_path}, \S+ \S+ read, \S+ \S+ written\)", repr(again))
    assert re.fullmatch(
        r"PrefixStore\(exact, 0 \S+ of \S+ \S+ in memory\)", repr(PrefixStore(None, recipe, model=model))
    )


@pytest.mark.parametrize(
    "name", ["higgs-2bit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kivi-2bit", "exact-pre"))]
)
def test_a_loaded_cache_goes_on_as_the_one_that_was_kept(tmp_path, model, name):
    """The same steps after it give the same logits, bit for bit."""
    recipe, ids = recipe_of(name, model), prompt(200)
    store = PrefixStore(tmp_path, recipe, model=model)
    first, count = KVQCache.from_recipe(recipe, model), 64
    with torch.no_grad():
        model(ids[:, :count], past_key_values=first)
        while first.blocks.layers[0].blocks < 3:
            count += 1
            model(ids[:, count - 1 : count], past_key_values=first)
    encoded = first.blocks.layers[0].encoded
    assert store.put(first, ids) >= encoded
    loaded = store.load(ids[:, : encoded + 1], recent=1)
    assert loaded.get_seq_length() == encoded
    rest = [layer.window_2BTC.clone() for layer in first.blocks.layers.values()]
    for layer, window_2BTC in enumerate(rest):  # the window that it had
        loaded.blocks.positions.announce(None, None, first.blocks.positions.rotary)
        loaded.blocks.take(layer, *window_2BTC)
        loaded.blocks.finish(layer)
    with torch.no_grad():
        for step in range(count, count + 8):
            ours, theirs = (model(ids[:, step : step + 1], past_key_values=cache).logits for cache in (loaded, first))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["aqua-2bit"])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("kvq", marks=pytest.mark.slow)])
def test_a_chained_recipe_is_kept_from_a_dynamic_cache(tmp_path, attention, name):
    model = random_model("qwen2", attention)
    recipe, ids = recipe_of(name, model), prompt(70)
    tensors = fitted.tensors(recipe, geometry_of(model))
    store = PrefixStore(tmp_path, recipe_of("exact", model), model=model)
    store.recipe, blocks = recipe, store._blocks  # a fit without a calibration
    store._blocks = PrefixBlocks(
        tmp_path, recipe, geometry_of(model), tensors, model="m", dtype=model.dtype, rotary=rotary(model)
    )
    store._empty = lambda: KVQCache(recipe, model, tensors)  # type: ignore[method-assign]
    exact, own = DynamicCache(config=model.config), store._empty()
    with torch.no_grad():
        model(ids, past_key_values=exact)
        model(ids, past_key_values=own)
    assert store.put(exact, ids) == 64
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for path in files:
        path.unlink()
    assert store.put(own, ids) == 64  # its blocks are the same, but for what sdpa and kvq round in a prompt
    if attention == "sdpa":
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == files
    loaded = store.load(ids)
    assert loaded.get_seq_length() == (70 - recipe.window.recent) // 16 * 16
    out = model.generate(ids, past_key_values=loaded, **NEW)
    assert out.shape == (1, 82) and blocks is not store._blocks


def rotary(model):
    module = model.model.rotary_emb
    return Rotary(module.inv_freq.float(), 1.0, model.dtype)


def test_beams_keep_the_prompt(tmp_path, model):
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model=model), prompt(50)
    expected = model.generate(ids, num_beams=3, **NEW)
    for _ in range(2):
        assert torch.equal(store.generate(ids, num_beams=3, **NEW), expected)
    assert store.longest(ids) == 48


def test_a_fine_tune_finds_nothing(tmp_path, model):
    """Weights that neither keys nor values of the first layer know of: those of the last projection of the first."""
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model=model), prompt(50)
    store.generate(ids, **NEW)
    tuned = random_model("llama")
    assert PrefixStore(tmp_path, store.recipe, model=tuned).longest(ids) == 48
    with torch.no_grad():
        tuned.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    assert PrefixStore(tmp_path, store.recipe, model=tuned).longest(ids) == 0


def test_a_full_disk_costs_no_answer(tmp_path, model, monkeypatch, caplog):
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model=model), prompt(50)
    monkeypatch.setenv("KVQ_FAULT", "draft.opened:1:full")
    assert torch.equal(store.generate(ids, **NEW), model.generate(ids, **NEW))
    assert "No space left" in caplog.text and store.longest(ids) == 0
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_disk_that_refuses_is_told_once_until_it_takes_a_block(tmp_path, model, monkeypatch, caplog):
    store = PrefixStore(tmp_path, recipe_of("exact", model), model=model)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    for number in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "put", full)
            for _ in range(2):
                store.generate(prompt(50, number), **NEW)
        assert caplog.text.count("No space left on device") == number
        store.generate(prompt(50, number), **NEW)
        assert store.longest(prompt(50, number)) > 0


def test_what_cannot_be_kept_is_refused(tmp_path, model):
    store, ids = PrefixStore(tmp_path, recipe_of("exact", model), model=model), prompt(50)
    with pytest.raises(ValueError, match="one prompt at a time"):
        store.generate(ids.expand(2, -1), **NEW)
    with pytest.raises(ValueError, match="without padding"):
        store.generate(ids, attention_mask=torch.zeros_like(ids), **NEW)
    with pytest.raises(ValueError, match="the store of exact"):
        store.put(KVQCache.from_recipe("higgs-2bit", model), ids)
    with pytest.raises(ValueError, match="recent=-1"):
        store.load(ids, recent=-1)
    with pytest.raises(ValueError, match="arrive"):
        PrefixStore(tmp_path, "subkv-2bit", model=model)
    with pytest.raises(TypeError, match="Recipe"):
        PrefixStore(tmp_path, 3, model=model)  # type: ignore[arg-type]
    config = MistralConfig(**model.config.to_dict() | {"sliding_window": 16, "model_type": "mistral"})
    with pytest.raises(ValueError, match="attend"):
        PrefixStore(tmp_path, "exact", model=MistralForCausalLM(config))
