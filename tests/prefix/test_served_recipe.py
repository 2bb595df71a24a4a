"""What KVQ_CACHE names, and whether it is for the model that is served."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import tiny as tiny_model
import torch
from tiny_artifact import tiny
from transformers import AutoModelForCausalLM

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import codec
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import preset
from kvq_runtime.registry.lock import Lock, write_lock
from kvq_runtime.stages.predict import Bias
from kvq_runtime.vllm import plugin, served_recipe


@pytest.fixture(autouse=True)
def nothing_loaded():
    plugin.load.cache_clear()


@pytest.fixture
def fitted(demo_model: Path, tmp_path: Path) -> tuple[Path, dict]:
    """An artifact of the embedded model, with means drawn at random, and that model's configuration."""
    config = json.loads((demo_model / "config.json").read_text())
    weights = safetensors.torch.load_file(demo_model / "model.safetensors")
    ours = fingerprint.from_config(config, lambda n, name: weights[f"model.layers.{n}.self_attn.{name}.weight"])
    recipe = preset("mean-lloyd-3bit-post")
    specs = codec.all_specs(recipe, ours.geometry)
    tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in specs.items()}
    path = tmp_path / "mine.safetensors"
    artifact.save(Artifact(recipe, ours, tensors, {}, {}), path)
    return path, config


def test_an_artifact_is_compared_with_the_models_own_files(fitted, demo_model: Path, tmp_path: Path):
    """Its weights are read from the model's folder; others of the same shape are another model."""
    path, config = fitted
    found = plugin.load(str(path))
    assert served_recipe.match(found, config, str(demo_model), None)[1] == Geometry(6, 2, 64)
    other = safetensors.torch.load_file(demo_model / "model.safetensors")
    other = {name: x.flip(0).contiguous() for name, x in other.items()}
    (tmp_path / "other").mkdir()
    safetensors.torch.save_file(other, tmp_path / "other" / "model.safetensors")
    with pytest.raises(ArtifactError, match="fingerprint: weights of layer"):
        served_recipe.match(found, config, str(tmp_path / "other"), None)
    turned = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.raises(ArtifactError, match="rope is .* in the model"):
        served_recipe.match(found, turned, str(demo_model), None)
    with pytest.warns(UserWarning, match="cannot be compared"):
        served_recipe.match(found, config, str(tmp_path), None)  # a folder without weights


def test_a_lock_file_pins_it(fitted, tmp_path: Path):
    """By the name of the lock file alone; a file that was changed since is refused."""
    path, _ = fitted
    data = path.read_bytes()
    lock = Lock(str(path), "", "mine", "1.0.0", artifact.hash_of(data).hexdigest(), len(data), "b" * 64)
    write_lock(tmp_path / "production.lock", lock)
    assert plugin.load(str(tmp_path / "production.lock")).recipe.name == "mean-lloyd-3bit-post"
    plugin.load.cache_clear()
    path.write_bytes(data[:-1] + b"\x00\x01")
    with pytest.raises(ArtifactError, match=r"KVQ_CACHE=.*production.lock: lock: .* pins mine"):
        plugin.load(str(tmp_path / "production.lock"))


def test_engines_that_move_or_share_keys_otherwise_are_refused():
    for change, message in [
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "drop --kv-cache-dtype fp8"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "drop decode context parallelism"),
    ]:
        served = {"cache_config": SimpleNamespace(cache_dtype="auto")}
        served |= {"parallel_config": SimpleNamespace(decode_context_parallel_size=1)}
        plugin.check_engine(SimpleNamespace(**served))
        with pytest.raises(ValueError, match=message):
            plugin.check_engine(SimpleNamespace(**served | change))


def test_what_is_not_there_or_cannot_be_served_is_said_before_a_model_is_read(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KVQ_REGISTRY", str(tmp_path / "registry"))
    artifact.save(tiny(), tmp_path / "tiny.safetensors")
    for reference, message in [
        ("no-such-name", "no-such-name"), ("aqua-2bit", "cannot serve aqua-2bit: .* use kivi-4bit"),
        ("mean-lloyd-3bit-post", "has to be fitted to a model: kvq-calibrate"),
        ("subkv-2bit", "vLLM decides which pages are held"), (str(tmp_path / "tiny.safetensors"), "layer below"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message) as refused:
            plugin.load(reference)
        assert str(refused.value).startswith(f"KVQ_CACHE={reference}: ")


def test_the_bias_of_keys_comes_from_the_models_own_files(tmp_path: Path):
    """Of a folder, as KVQCache.from_recipe takes it from the loaded model; and none of a model that is elsewhere."""
    folder = tiny_model.save(tmp_path, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    served, geometry = served_recipe.match(served_recipe.read("rtn-4bit"), config, str(folder), None)
    cache = KVQCache.from_recipe("rtn-4bit", AutoModelForCausalLM.from_pretrained(folder))
    assert served.recipe == cache.blocks.recipe and isinstance(served.recipe.key.predict, Bias)
    for layer, (keys, _) in enumerate(cache.blocks.codecs):
        torch.testing.assert_close(served.tensors[f"layers.{layer}.key.predict.mean"], keys.centre)
    assert geometry == cache.blocks.geometry
    kept = served_recipe.read("rtn-4bit+key_bias=kept")
    assert served_recipe.match(kept, config, str(folder), None)[0] is kept
    with pytest.raises(ValueError, match="key_bias=kept"):
        served_recipe.match(served_recipe.read("rtn-4bit"), config, "no/model-here", None)
