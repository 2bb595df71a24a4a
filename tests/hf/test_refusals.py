"""What no cache is made for, and what the attention does not know, is refused with one sentence."""

import pytest
import torch
from architectures import random
from generating import kvq, stock
from models import SHAPE, prompt, random_model
from tiny_artifact import tiny
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

from kvq_runtime import load_artifact, preset, save_pretrained
from kvq_runtime.artifact import fingerprint
from kvq_runtime.errors import ArtifactError
from kvq_runtime.hf import KVQCache, fingerprint_of, geometry_of
from kvq_runtime.hf.model import check_model

PLAIN = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
REFUSED = {
    "bert": ("causal", PLAIN, "no decoder alone with layers as Llama has"),
    "t5": ("seq2seq", {"d_model": 32, "d_ff": 32, "num_layers": 1, "d_kv": 16}, "no decoder alone"),
    "mamba": (
        "causal",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
        "no decoder alone|no layer of this model attends to all",
    ),
}


def made(kind: str, task: str = "causal", **settings):
    """A model of an architecture, on no device: only its modules and configuration are asked."""
    build = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM, "base": AutoModel}[task]
    with torch.device("meta"):
        return build.from_config(AutoConfig.for_model(kind, **settings)).eval()


@pytest.mark.parametrize("kind", REFUSED)
def test_architectures_that_cannot_be_held_are_refused_and_left_alone(kind):
    task, settings, why = REFUSED[kind]
    model = made(kind, task, **settings)
    for _ in range(2):  # a model that was refused once is not taken the second time
        with pytest.raises(ValueError, match=why):
            KVQCache.from_recipe("exact", model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_of_other_shapes_are_refused_when_first_seen():
    cache = kvq("exact", random_model("llama"))
    with pytest.raises(
        ValueError, match="layer 0 caches values of 2 heads of 16; the configuration says 2 heads of 32"
    ):
        cache.update(torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 5, 16), 0)


def test_a_projection_in_one_with_others_is_probed_by_its_rows():
    model = random("phi3")
    found, width = fingerprint_of(model), geometry_of(model).width
    for layer, module in enumerate(model.model.layers):
        weight = module.self_attn.qkv_proj.weight
        for place, role in ((1, "key"), (2, "value")):
            rows = weight[len(weight) - (3 - place) * width :][:width]
            probe = found.probes[f"layers.{layer}.{role}.fingerprint.probe"]
            assert torch.equal(probe, fingerprint.probe(rows))


class Adapted(nn.Module):
    """A projection with an adapter, as PEFT's layers have it."""

    merged, disable_adapters, active_adapters = False, False, ("default",)

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def merge(self) -> None:
        self.merged = True
        self.base_layer.weight.data *= 1.25


def test_an_adapter_in_use_counts_as_if_it_were_merged():
    model = random_model("llama")
    base, attention = fingerprint_of(model), model.model.layers[1].self_attn
    attention.k_proj = Adapted(attention.k_proj)
    with pytest.raises(ArtifactError, match=r"weights of layer 1 key differ by 0\.25 of their norm"):
        fingerprint.check_match(base, fingerprint_of(model))
    assert not attention.k_proj.merged
    for change in ({"disable_adapters": True}, {"active_adapters": []}):
        vars(attention.k_proj).update(change)
        fingerprint.check_match(base, fingerprint_of(model))
        vars(attention.k_proj).update(disable_adapters=False, active_adapters=["default"])
    attention.k_proj.merge()
    with pytest.raises(ArtifactError, match=r"differ by 0\.25"):
        fingerprint.check_match(base, fingerprint_of(model))


@pytest.mark.parametrize("layout, fits", [
    ({"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}, False),
    ({"model.layers.0": "cuda:0", "model.layers.1": 0, "model.layers.2": "cpu", "lm_head": "disk"}, True),
    ({"": "cpu"}, True),
])  # fmt: skip
def test_layers_of_one_model_on_several_devices(layout, fits):
    model = random_model("llama")
    model.hf_device_map = layout
    if fits:
        check_model(model)
        return
    with pytest.raises(ValueError, match="on cuda:0 and cuda:1; kvq needs them on one device"):
        KVQCache.from_recipe("exact", model)


# ---- misuse ----


@pytest.mark.parametrize("make, why", [
    (lambda model: KVQCache.from_recipe("higgs-2bit", "path"), "model is of type str; give the loaded"),
    (lambda model: KVQCache("higgs-2bit", model), "recipe is of type str; give a Recipe, or its name to from_recipe"),
    (lambda model: KVQCache.from_artifact("name", model), "artifact is of type str; give what load_artifact returns"),
    (lambda model: KVQCache.from_artifact(tiny(), model, 1), "allow_other_weights is of type int; give True or"),
    (lambda model: load_artifact(None), "reference is of type NoneType; give the name of an artifact, or a path"),
    (lambda model: load_artifact("name", lock=5), "lock is of type int; give the path of a file that kvq pull --lock"),
    (lambda model: save_pretrained(model, "folder"), "artifact is of type LlamaForCausalLM; give what load_artifact"),
    (lambda model: preset(4), "name is of type int; give that of a recipe, as in preset"),
])  # fmt: skip
def test_what_is_no_recipe_or_no_model_is_a_type_error(make, why):
    with pytest.raises(TypeError, match=why):
        make(random_model("llama"))


# ---- arguments of attention ----


@pytest.mark.parametrize("given, why", [
    ({"sliding_window": 16}, "sliding_window"),
    ({"is_causal": False}, "is_causal"), ({"position_bias": torch.zeros(1), "novel": 1}, "novel, position_bias"),
])  # fmt: skip
def test_arguments_that_may_change_the_result_are_refused(given, why):
    model, ids = random_model("llama", "kvq"), prompt(2, 60)
    cache = kvq("exact", model)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache, **dict.fromkeys(given))  # None changes nothing
        with pytest.raises(ValueError, match=f"kvq attention does not know {why}, which may change"):
            model(ids[:, 40:41], past_key_values=cache, **given)
        assert cache.get_seq_length() == 40
        model(ids[:, 40:41], past_key_values=cache, output_attentions=False, output_router_logits=False)
    assert cache.get_seq_length() == 41


# ---- recurrent layers ----


def test_a_pass_over_recurrent_layers_that_stopped_midway_is_not_undone():
    kinds = ["linear_attention", "full_attention", "full_attention"]
    settings = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "layer_types": kinds,
                "shared_expert_intermediate_size": 32, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **SHAPE, **settings)).eval()
    ids, cache, other = prompt(2, 60), kvq("exact", model), stock(model)

    def fail(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        for a, b in ((0, 40), (40, 41)):
            one = model(ids[:, a:b], past_key_values=cache).logits
            assert torch.equal(one, model(ids[:, a:b], past_key_values=other).logits)
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 41:42], past_key_values=cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="has changed the state of recurrent layers"):
                model(ids[:, 41:42], past_key_values=cache)
        with pytest.raises(RuntimeError, match="crop\\(-1\\): this model has recurrent layers"):
            cache.crop(-1)
        cache.reset()
        one = model(ids[:, :40], past_key_values=cache).logits
        assert torch.equal(one, model(ids[:, :40], past_key_values=stock(model)).logits)
        beams, expected = kvq("exact", model), stock(model)
        for held in (beams, expected):
            model(ids[:, :40], past_key_values=held)
            held.reorder_cache(torch.tensor([1, 0]))
        one = model(ids[:, 40:], past_key_values=beams).logits
        assert torch.equal(one, model(ids[:, 40:], past_key_values=expected).logits)


def test_a_shorter_prompt_into_a_full_cache_is_refused_and_changes_nothing():
    model = random_model("llama")
    cache = kvq("higgs-2bit", model)
    model.generate(prompt(2, 40), past_key_values=cache, max_new_tokens=4, do_sample=False)
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"holds {held} tokens, and the prompt has none beyond them: reset"):
        model.generate(prompt(2, 10), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.get_seq_length() == held
    cache.reset()
    again = model.generate(prompt(2, 10), past_key_values=cache, max_new_tokens=4, do_sample=False)
    fresh = model.generate(prompt(2, 10), past_key_values=kvq("higgs-2bit", model), max_new_tokens=4, do_sample=False)
    assert torch.equal(again, fresh)


@pytest.mark.parametrize(("rows", "held", "length"), [(1, 42, 41), (2, 42, 30), (1, 43, 22)])
def test_tokens_that_the_cache_holds_are_not_taken_in_again(rows, held, length, monkeypatch):
    """`generate` hands on the last tokens of a prompt that is shorter than the cache, as if they were new."""
    model, asked = random_model("llama"), {"do_sample": False, "pad_token_id": 1}
    cache = kvq("higgs-2bit", model)
    mask = torch.ones(rows, 40, dtype=torch.int64)
    mask[1:, :3] = 0  # of two rows one is padded: the other tells
    model.generate(prompt(rows), attention_mask=mask, past_key_values=cache, max_new_tokens=held - 39, **asked)
    monkeypatch.setattr(cache.blocks, "take", None)
    other = {"attention_mask": torch.ones(rows, length, dtype=torch.int64)}
    other["attention_mask"][1:, :5] = 0
    with pytest.raises(ValueError, match=f"holds {held} tokens, .* again those from position {held - length} on: crop"):
        model.generate(prompt(rows, length), past_key_values=cache, max_new_tokens=4, **asked, **other)
    assert cache.get_seq_length() == held


def test_a_step_that_would_take_in_all_of_the_text_again_is_refused():
    """With use_cache=False, `generate` hands on the whole text at every step."""
    model, ids = random("llama", use_cache=False), prompt(2, 60)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    with pytest.raises(ValueError, match="holds 60 tokens, and use_cache=False .*; pass use_cache=True to generate"):
        model.generate(ids, past_key_values=kvq("exact", model), **asked)
    expected = model.generate(ids, **asked)
    found = model.generate(ids, past_key_values=kvq("exact", model), **asked, use_cache=True)
    assert torch.equal(found, expected)
