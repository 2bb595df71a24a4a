"""Layers whose keys are not RoPE of one key are found before a recipe would undo it, whatever a configuration says."""

import functools

import pytest
import torch
from architectures import random
from generating import kvq
from models import SHAPE
from transformers import ChameleonConfig, ChameleonModel

from kvq_runtime.hf.model import CACHE
from kvq_runtime.hf.rotation import rope_refusal


def lying(model, layer: int, change):
    """The model, of which one layer's attention gets other rotations than it is given."""
    attention = model.get_decoder().layers[layer].self_attn

    class Lying(type(attention)):
        @functools.wraps(type(attention).forward)
        def forward(self, *args, position_embeddings, **given):
            return super().forward(*args, position_embeddings=change(*position_embeddings), **given)

    attention.__class__ = Lying
    return model


@pytest.mark.parametrize("change, why", [
    (lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)), r"layer 1 \(llama\) has no RoPE"),
    (lambda cos, sin: (cos, -sin), r"layer 1 \(llama\) turns keys otherwise"),
    (lambda cos, sin: (cos[..., :2], sin[..., :2]), r"layer 1 \(llama\) does not show how it turns keys: "),
])  # fmt: skip
def test_a_layer_that_turns_otherwise_is_refused(change, why):
    with pytest.raises(ValueError, match=f"exact-pre undoes RoPE, but {why}.*; use a post-RoPE recipe"):
        kvq("exact-pre", lying(random("llama"), 1, change))
    kvq("exact", lying(random("llama"), 1, change))


def test_each_compressed_layer_is_asked():
    """Of Lara Mini those that attend to all tokens are given no rotation, and could turn by one."""
    model = random("lara_mini")
    with pytest.raises(ValueError, match=r"exact-pre undoes RoPE, but layer 2 \(lara_mini\) has no RoPE"):
        kvq("exact-pre", model)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3n_text", "deepseek_v3", "phi3"])
def test_asking_needs_no_weights_and_changes_nothing(kind):
    model, told = random(kind).to(torch.bfloat16), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = [part.register_forward_pre_hook(lambda *given: told.append(given)) for part in model.modules()]
    model.train()
    kvq("exact-pre", model)
    assert not told and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for hook in hooks:
        hook.remove()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), **{CACHE: kvq("exact-pre", model)})
    with torch.device("meta"):
        empty = type(model)(model.config).get_decoder()
    empty.rotary_emb = model.get_decoder().rotary_emb
    assert rope_refusal(empty, {1: empty.layers[1]}) is None


def test_compiled_layers_are_asked_as_they_were():
    """By a method of the layer, or wrapped: neither runs with its own weights, of another dtype."""
    model = random("llama").to(torch.bfloat16)
    layers = model.get_decoder().layers
    layers[0].compile(backend="eager")
    layers[1].self_attn.compile(backend="eager")
    kvq("exact-pre", model)
    wrapped = random("llama")
    layers = wrapped.get_decoder().layers
    layers[0] = torch.compile(layers[0], backend="eager")
    assert rope_refusal(wrapped.get_decoder(), dict(enumerate(layers))) is None


def test_want_of_memory_is_nothing_of_the_model(monkeypatch):
    model = random("llama")
    attention = type(model.get_decoder().layers[0].self_attn)

    @functools.wraps(attention.forward)
    def full(*given, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(attention, "forward", full)
        kvq("exact-pre", model)
    kvq("exact-pre", model)


def test_a_norm_behind_the_rotation_is_none_of_it():
    """HunYuan scales channels of rotated keys: what is turned back and again is the same, whatever the scales are."""
    model = random("hunyuan_v1_moe")
    for layer in model.get_decoder().layers:
        torch.nn.init.uniform_(layer.self_attn.key_layernorm.weight, 0.5, 2.0)
    kvq("exact-pre", model)


def test_layers_with_norms_by_head_that_put_out_tuples_are_asked():
    """Chameleon's: their scales have two dimensions."""
    image = {"embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1}
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    model = ChameleonModel(
        ChameleonConfig(**shape, vocabulary_map={"<image>": 4}, vq_config=image | {"channel_multiplier": [1, 1]})
    )
    assert rope_refusal(model, dict(enumerate(model.layers))) is None
