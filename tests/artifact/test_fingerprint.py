"""A fingerprint knows the model that an artifact was fitted to, in every float format, and no other."""

import json

import pytest
import torch

from kvq_runtime.artifact import fingerprint
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry, Sliding

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "rope_theta": 1000000,
}


def weights(seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {(i, n): torch.randn(16, 32, generator=generator) * 0.02 for i in (0, 1) for n in ("k_proj", "v_proj")}


def stamp(dtype=torch.float32, seed: int = 0, **config) -> Fingerprint:
    own = weights(seed)
    return fingerprint.from_config({**CONFIG, **config}, lambda layer, name: own[layer, name].to(dtype))


def test_a_fingerprint_reads_old_and_new_configurations():
    old = stamp()
    new = stamp(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=8)
    assert old.to_json() == new.to_json()
    assert old.geometry == Geometry(2, 2, 8)
    scaled = stamp(rope_scaling={"type": "linear", "factor": 4})
    assert scaled.rope == {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    assert stamp(model_type="qwen3").qk_norm and not old.qk_norm


@pytest.mark.parametrize("given, layers", [
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, [0]),
    ({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, [1]),
    ({"model_type": "qwen2", "sliding_window": 8}, [0, 1]),
])  # fmt: skip
def test_layers_that_slide_are_no_part_of_the_shape(given, layers):
    """As configurations of Gemma 3, Qwen2 and others say it; a probe is of the layer that has the place."""
    found, sliding = stamp(**given), Sliding(1, 16, 8)
    assert found.geometry == Geometry(len(layers), 2, 8)
    assert torch.equal(
        found.probes["layers.0.key.fingerprint.probe"], fingerprint.probe(weights()[layers[0], "k_proj"])
    )
    if len(layers) == 2:
        assert found.attending is None and found.sliding.layers == 0
        return
    assert (found.attending, found.sliding) == (tuple(layers), sliding)
    assert fingerprint.from_json(json.loads(json.dumps(found.to_json())), found.probes).to_json() == found.to_json()
    with pytest.raises(ArtifactError, match=r"attending is \[.\] in the model, all in the artifact"):
        fingerprint.check_match(stamp(num_hidden_layers=1), found)


@pytest.mark.parametrize("change", [
    {"attending": [1, 1]}, {"attending": []}, {"attending": [-1]}, {"attending": ["0"]}, {"attending": 0},
    {"sliding": {"layers": 1, "width": 16, "window": -1}}, {"sliding": {}},
    {"sliding": {"layers": 1, "width": 16, "window": 1e9}}, {"sliding": None},
    {"sliding": {"layers": 1, "width": 16, "window": 8, "sparse": 1}},
    {"geometry": {"layers": 1, "kv_heads": 2, "head_size": 8, "rate": 0}}, {"geometry": None},
])  # fmt: skip
def test_layers_in_a_file_may_be_anything(change):
    found = stamp(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    with pytest.raises(ArtifactError, match="fingerprint"):
        fingerprint.from_json(found.to_json() | change, found.probes)


def test_the_same_weights_pass_in_every_float_format():
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        for found in (torch.float32, torch.bfloat16, torch.float16):
            fingerprint.check_match(stamp(stored), stamp(found))


def test_another_model_is_refused():
    with pytest.raises(ArtifactError, match=r"geometry is .*'layers': 3.* in the model, .*'layers': 2"):
        own = weights()
        fingerprint.check_match(
            stamp(), fingerprint.from_config({**CONFIG, "num_hidden_layers": 3}, lambda i, n: own[i % 2, n])
        )
    with pytest.raises(ArtifactError, match="rope is .*500000.0.* in the model, .*1000000.0.* in the artifact"):
        fingerprint.check_match(stamp(), stamp(rope_theta=500000))
    with pytest.raises(ArtifactError, match="qk_norm is True in the model, False in the artifact"):
        fingerprint.check_match(stamp(), stamp(model_type="qwen3"))
    with pytest.raises(ArtifactError, match="weights of layer . .* differ by 1.*allow_other_weights=True"):
        fingerprint.check_match(stamp(), stamp(seed=1))
    with pytest.warns(UserWarning, match="weights of layer"):
        fingerprint.check_match(stamp(), stamp(seed=1), allow_other_weights=True)


def test_a_slight_fine_tune_is_refused_and_quantized_weights_warn():
    own = weights()
    near = {key: w + 0.05 * w.norm() / w.numel() ** 0.5 * torch.randn_like(w) for key, w in own.items()}
    tuned = fingerprint.from_config(CONFIG, lambda i, n: near[i, n])
    with pytest.raises(ArtifactError, match="weights of layer"):
        fingerprint.check_match(stamp(), tuned)
    quantized = fingerprint.from_config({**CONFIG, "quantization_config": {"bits": 4}}, lambda i, n: near[i, n])
    with pytest.warns(UserWarning, match="errors may be larger"):
        fingerprint.check_match(stamp(), quantized)
    with pytest.raises(ArtifactError, match="weights of layer"):  # quantized, and of another model
        fingerprint.check_match(stamp(seed=1), quantized)
    dequantized = fingerprint.from_config({**CONFIG, "dequantized_from": "Q4_1"}, lambda i, n: near[i, n])
    for stored, found in ((stamp(), dequantized), (dequantized, stamp())):
        with pytest.warns(UserWarning, match=r"differ by 0\.\d+ .*0\.5 where either is quantized.*kvq eval"):
            fingerprint.check_match(stored, found)
    fingerprint.check_match(dequantized, tuned)  # the same weights: silent
    packed = fingerprint.from_config(CONFIG, lambda i, n: torch.zeros(4, dtype=torch.uint8))
    assert not packed.probes and packed.quantized
    with pytest.warns(UserWarning, match="packed weights cannot be compared"):
        fingerprint.check_match(stamp(), packed)
