"""What a cache shows and shares: its name in transformers, and one copy of a fit for all caches."""

import copy
import gc
import weakref

import fitted
import pytest
import torch
from feeding import small
from generating import kvq
from models import prompt, random_model
from tiers import some
from transformers import AttentionInterface

from kvq_runtime import KVQCache
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.hf import fingerprint_of, geometry_of
from kvq_runtime.recipe import preset
from kvq_runtime.store.storage import storage_bytes


@pytest.fixture
def model():
    return random_model()


def fit(name: str, model) -> Artifact:
    """An artifact with random tensors that belongs to the model."""
    recipe = small(preset(name), geometry_of(model))
    return Artifact(recipe, fingerprint_of(model), fitted.tensors(recipe, geometry_of(model)), {}, {})


def held(*caches: KVQCache) -> int:
    """Bytes of what does not grow with tokens, in all of these caches together, each storage once."""
    codecs = [codec for cache in caches for pair in cache.blocks.codecs for codec in pair]
    return storage_bytes(tensor for codec in codecs for tensor in codec.shared)


@pytest.mark.parametrize("name", some(["aqua-2bit", "aqua-fisher-1bit", "oscar-2bit"], "aqua-2bit"))
def test_caches_of_one_file_hold_its_tensors_once(name, model, tmp_path):
    """Also what codecs derive from them, such as a rotation back; from any path to the same bytes."""
    made = fit(name, model)
    (tmp_path / "again").mkdir()
    for folder in (tmp_path, tmp_path / "again"):
        artifact.save(made, folder / "kvq.safetensors")
    caches = [KVQCache.from_pretrained(folder, model) for folder in (tmp_path, tmp_path / "again", tmp_path)]
    caches.append(copy.deepcopy(caches[0]))
    one = caches[0].memory_report().shared_bytes
    assert held(*caches) == held(caches[0]) == one > 0
    for cache in caches:
        assert cache.memory_report().shared_bytes == one
        with torch.no_grad():
            model(prompt(1, 60), past_key_values=cache)
    assert held(*caches) == one and len({str(cache.artifact.recipe.to_json()) for cache in caches}) == 1
    gone = weakref.ref(caches[0].artifact)
    del caches, cache
    gc.collect()
    assert gone() is None


def test_importing_the_cache_registers_its_attention():
    assert "kvq" in AttentionInterface().valid_keys()
    assert random_model(attention="kvq").config._attn_implementation == "kvq"


def test_what_is_internal_is_named_so(model):
    """Beside what transformers asks of a cache, a KVQCache has only what docs/api.md describes."""
    own = {name for name in vars(KVQCache) if not name.startswith("_")}
    assert own == {
        "attention", "batch_repeat_interleave", "batch_select_indices", "crop", "from_artifact",
        "from_pretrained", "from_recipe", "get_seq_length", "memory_report",
        "refusal", "reorder_cache", "reset",
    }  # fmt: skip
    assert KVQCache.__init__.__doc__ and kvq("higgs-2bit", model).artifact is None
