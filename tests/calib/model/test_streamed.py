"""A model streamed by layers is the whole model, and what is captured is what its attention sees."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvq_calib.model import find as models
from kvq_calib.model.streamed import Stream, default_dtype
from kvq_runtime.ops import product, rope

SIZE = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=128, max_position_embeddings=256)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "llama-3.1": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZE, rope_parameters=YARN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=20)),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    """A tiny random model, its biases and norms random too, in several files."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "_proj" in name:
                parameter.mul_(8)  # so that attention is far from uniform
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def _tokens(rows: int = 3, length: int = 33) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(2))


def _whole(folder: Path, tokens: torch.Tensor):
    """The whole model's own view: logits, cached keys and values by layer, what attention hands to o_proj, hiddens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    attended, cache = [], DynamicCache()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0]))
    with torch.no_grad():
        out = model(tokens, past_key_values=cache, output_hidden_states=True)
    return out, cache, attended


def test_a_streamed_model_is_the_whole_model(folder: Path):
    tokens = _tokens()
    out, cache, attended = _whole(folder, tokens)
    stream = Stream(models.resolve(folder), dtype=torch.float32)
    heads, group = (
        stream.files.geometry.kv_heads,
        stream.files.config["num_attention_heads"] // stream.files.geometry.kv_heads,
    )
    cos, sin = stream.rope(tokens.shape[1])
    h = stream.embed(tokens)
    for index in range(stream.layers):
        torch.testing.assert_close(h, out.hidden_states[index])
        seen = stream.layer(index).forward(h, queries=True)
        k = rope.rotate(seen.k_NTC.unflatten(-1, (heads, -1)), cos, sin).transpose(1, 2)
        q = rope.rotate(seen.q_NTC.unflatten(-1, (heads * group, -1)), cos, sin).transpose(1, 2)
        v = seen.v_NTC.unflatten(-1, (heads, -1)).transpose(1, 2)
        torch.testing.assert_close(k, cache.layers[index].keys)
        torch.testing.assert_close(v, cache.layers[index].values)
        ours = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(ours.transpose(1, 2).flatten(2), attended[index], atol=1e-4, rtol=1e-4)
        h = seen.h_BTE
    torch.testing.assert_close(stream.head()(h), out.logits, atol=1e-4, rtol=1e-4)


def test_only_one_layer_is_held(tmp_path: Path):
    MODELS["qwen3"]().save_pretrained(tmp_path)
    stream = Stream(models.resolve(tmp_path), dtype=torch.float32)
    h = stream.embed(_tokens())
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


def test_later_tokens_do_not_change_earlier_ones(demo_model: Path):
    stream = Stream(models.resolve("demo"), dtype=torch.float32)
    tokens = _tokens()
    long = stream.layer(0).forward(stream.embed(tokens)).h_BTE
    short = stream.layer(0).forward(stream.embed(tokens[:, :20])).h_BTE
    torch.testing.assert_close(long[:, :20], short)


def test_the_default_dtype_is_the_weights_own_where_it_is_fast(demo_model: Path, monkeypatch: pytest.MonkeyPatch):
    files = models.resolve("demo")
    for native, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(product, "multiplies_bfloat16", lambda native=native: native)
        assert default_dtype(files, torch.device("cpu")) == expected
    assert default_dtype(files, torch.device("cuda")) == torch.bfloat16


def test_weights_that_do_not_fit_are_named(tmp_path: Path):
    MODELS["qwen3"]().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 32'))
    with pytest.raises(ValueError, match=r"do not fit its config\.json"):
        Stream(models.resolve(tmp_path)).layer(0)
