"""A model of each listed family, run a layer at a time, is the whole model; others are refused by name."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from kvq_calib.model import find as models
from kvq_calib.model.streamed import Stream, default_dtype
from kvq_runtime.families import FAMILIES
from kvq_runtime.hf import fingerprint_of
from kvq_runtime.ops import product, rope

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDES = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16, "use_sliding_window": True,
}  # fmt: skip
RECURS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 32}
GEMMA4 = SLIDES | {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_kv_shared_layers": 0}
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "qwen3": {"rope_parameters": YARN},
    "mistral": {"sliding_window": None}, "mixtral": EXPERTS,
    "qwen2": SLIDES, "qwen2_moe": EXPERTS | SHARED, "qwen3_moe": EXPERTS, "phi3": {},
    "gemma2": SLIDES, "gemma3_text": SLIDES, "gemma4_text": GEMMA4, "olmo3": SLIDES,
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]}, "gpt_oss": EXPERTS | SLIDES,
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen3_next": EXPERTS | SHARED | RECURS, "qwen3_5_text": RECURS, "qwen3_5_moe_text": EXPERTS | SHARED | RECURS,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14,
}  # fmt: skip
IMAGES = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
QUICK = ("llama", "qwen3", "gemma3", "gemma2", "phi3", "gpt_oss", "qwen3_next", "qwen3_moe", "granite")
TEXT = [kind for kind in FAMILIES if f"{kind}_text" not in FAMILIES]
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in [*TEXT, *IMAGES]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Make the folder of a random model, its norms and biases random too, once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(0)
            text = SHAPE | OWN.get(IMAGES.get(kind, kind), {})
            if kind in IMAGES:
                settings: dict[str, Any] = {"text_config": text, "vision_config": TOWER, "mm_tokens_per_image": 1}
                model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings))
            else:
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **text))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.std()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_model_is_the_whole_model(kind, folders):
    files = models.resolve(folders(kind))
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(3))
    whole, stream = files.model(torch.float32).eval(), Stream(files, dtype=torch.float32)
    cache = DynamicCache(config=whole.config)
    with torch.no_grad():
        expected = whole(input_ids=ids, past_key_values=cache).logits
    cos, sin = stream.rope(ids.shape[1])
    h = stream.embed(ids)
    for index, place in enumerate(files.attending):
        seen = stream.layer(index).forward(h, queries=True)
        k_BTHD = seen.k_NTC.unflatten(-1, (files.geometry.kv_heads, -1))
        near(rope.rotate(k_BTHD, cos, sin).transpose(1, 2), cache.layers[place].keys)
        near(seen.v_NTC.unflatten(-1, (files.geometry.kv_heads, -1)).transpose(1, 2), cache.layers[place].values)
        h = seen.h_BTE
    near(stream.head()(h), expected)
    assert fingerprint_of(whole).to_json() == files.fingerprint().to_json()


@pytest.mark.parametrize("kind", [kind for kind in QUICK if kind != "gemma3"])
def test_gradients_are_those_of_the_whole_model(kind, folders):
    """With respect to values, and to the hidden states under the layer, by autograd through the whole model."""
    files = models.resolve(folders(kind))
    ids = torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(3))
    stream = Stream(files, dtype=torch.float32)
    hidden = [stream.embed(ids)]
    for index in range(stream.layers):
        hidden.append(stream.layer(index).forward(hidden[-1]).h_BTE)
    above = torch.randn(hidden[-1].shape, generator=torch.Generator().manual_seed(4))
    h = hidden[-2].clone().requires_grad_()
    layer = stream.layer(stream.layers - 1)
    with torch.enable_grad():
        out = layer._run(h)
        expected = torch.autograd.grad(out, (h, layer._seen["v"]), above)
    below, key, value = layer.gradients(hidden[-2], above)
    near(below, expected[0])
    near(value, expected[1].transpose(1, 2).flatten(2))
    assert key.shape == value.shape and float(key.abs().max()) > 0


def test_gradients_of_logits_that_are_scaled(folders):
    """∂/∂h of the two log probabilities, by autograd through all of the head."""
    for kind in ("granite", "gemma2"):
        stream = Stream(models.resolve(folders(kind)), dtype=torch.float32)
        head, h = stream.head(), torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 3
        uniform = torch.rand(7, 2, generator=torch.Generator().manual_seed(1))
        found, h = head.gradient(h, uniform), h.requires_grad_()
        log = head._logits(h[None])[0].log_softmax(-1)
        drawn = torch.searchsorted(log.exp().cumsum(-1).detach(), uniform).clamp(max=96)
        first, second = log.gather(1, drawn).unbind(1)
        near(found, torch.autograd.grad((first - second).sum() / 2**0.5, h)[0])


def changed(folder: Path, target: Path, **settings: Any) -> Path:
    """A copy of a model whose config.json says something else; the weights are not copied."""
    target.mkdir()
    given = json.loads((folder / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(given))
    return target


@pytest.mark.parametrize("settings, why", [
    ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3' is not a family that kvq serves; use a model of llama"),
    ({"model_type": None, "auto_map": {"AutoModel": "own.Model"}}, "model_type=None is not a family"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights, by gptq; calibrate the 16-bit model"),
    ({"architectures": ["Gemma2ForSequenceClassification"]}, "of model_type gemma2 Gemma2ForCausalLM is calibrated"),
    ({"num_kv_shared_layers": 2}, "models with layers that share keys and values are not calibrated"),
    ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
])  # fmt: skip
def test_what_is_not_served_is_refused_before_weights_are_read(settings, why, folders, tmp_path):
    with pytest.raises(ValueError, match=why):
        models.resolve(changed(folders("gemma2"), tmp_path / "other", **settings))


def test_recipes_that_undo_rope_need_layers_that_turn_keys(folders):
    from kvq_calib.run import plan as plans
    from kvq_runtime.recipe import preset

    files = models.resolve(folders("smollm3"))
    with pytest.raises(ValueError, match=r"undoes RoPE, but of smollm3.* some layers turn no keys"):
        plans.make(files, (preset("aqua-2bit"),), source="demo", samples=8, seq_len=64)


def test_only_one_layer_is_held(folders):
    stream = Stream(models.resolve(folders("qwen3")), dtype=torch.float32)
    h = stream.embed(torch.ones(3, 33, dtype=torch.int64))
    gc.collect()  # what other tests left; below, dropping a layer frees it without
    before = _live()
    for index in range(stream.layers):
        layer = stream.layer(index)
        h = layer.forward(h).h_BTE
        assert 0 < _live() - before <= stream.files.layer_bytes(index), f"layer {index}"
        del layer
        assert _live() == before, f"layer {index} is kept"


def _live() -> int:
    parameters = [x for x in gc.get_objects() if type(x) is nn.Parameter and x.device.type != "meta"]
    return sum(p.numel() * p.element_size() for p in parameters)


def test_the_default_dtype_is_the_weights_own_where_it_is_fast(demo_model: Path, monkeypatch: pytest.MonkeyPatch):
    files = models.resolve("demo")
    for native, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(product, "multiplies_bfloat16", lambda native=native: native)
        assert default_dtype(files, torch.device("cpu")) == expected
    assert default_dtype(files, torch.device("cuda")) == torch.bfloat16


def test_weights_that_do_not_fit_are_named(folders, tmp_path):
    folder = changed(folders("qwen3"), tmp_path / "other", intermediate_size=32)
    (folder / "model.safetensors").symlink_to(folders("qwen3") / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not fit its config\.json"):
        Stream(models.resolve(folder)).layer(0)
