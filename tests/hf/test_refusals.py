"""What no cache is made for, and what the attention does not know, is refused with one sentence; layers whose keys are
not RoPE of one key are found before a recipe would undo it, whatever a configuration says.
"""

import functools

import pytest
import torch
from architectures import random
from generating import kvq, stock
from models import SHAPE, prompt, random_model
from tiny_artifact import tiny
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    ChameleonConfig,
    ChameleonModel,
)

from kvq_runtime import PrefixStore, load_artifact, preset, save_pretrained
from kvq_runtime.artifact import fingerprint
from kvq_runtime.hf import KVQCache, fingerprint_of, geometry_of
from kvq_runtime.hf.model import CACHE, check_model
from kvq_runtime.hf.refusals import rope_refusal

PLAIN = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
REFUSED = {
    "bert": ("causal", PLAIN, "no decoder with layers as Llama has"),
    "t5": ("seq2seq", {"d_model": 32, "d_ff": 32, "num_layers": 1, "d_kv": 16}, "an encoder and attention across"),
    "mamba": (
        "causal",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
        "nothing that kvq would|does not say",
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


def test_a_model_that_attends_by_code_of_its_own_shows_no_queries():
    with pytest.raises(ValueError, match="h2o needs queries or weights .* FalconModel attends by code of its own"):
        KVQCache.from_recipe("h2o", random("falcon"))


@pytest.mark.parametrize("kind, why", [
    ("jetmoe", "keys and values that JetMoeDecoderLayer changes behind a cache"), ("doge", "masks by head, as Doge"),
    ("diffllama", "keys or values that DiffLlamaAttention changes"), ("inkling_text", "position_bias, which may"),
    ("gpt_oss", "of which this model's learned sinks take a share"),
])  # fmt: skip
def test_what_our_attention_does_not_know_is_found_when_a_cache_is_made(kind, why):
    """A recipe that needs it is refused; others hand such a model what they decode."""
    model = random(kind)
    model.get_decoder().register_forward_pre_hook(lambda *_given: pytest.fail("run"))
    with pytest.raises(ValueError, match=f"h2o needs queries or weights of attention, and .*{why}.*; use a recipe"):
        KVQCache.from_recipe("h2o", model)
    model.set_attn_implementation("kvq")
    assert (why in str(KVQCache.from_recipe("exact", model).refusal)) == (kind != "gpt_oss")


@pytest.mark.parametrize("kind, why", [
    ("deepseek_v4", "entries that a model puts beside keys and values"), ("inkling2_text", "sinks, which may change"),
])  # fmt: skip
def test_what_our_attention_cannot_even_read_decoded_is_refused_where_it_is_set(kind, why):
    model = random(kind)
    KVQCache.from_recipe("exact", model)
    model.set_attn_implementation("kvq")
    with pytest.raises(ValueError, match=f"kvq attention does not know {why}.*; use .*eager"):
        KVQCache.from_recipe("exact", model)


@pytest.mark.parametrize("kind, why", [
    ("glm4", r"layer 0 \(glm4\) turns keys otherwise"), ("ernie4_5", "layer 0 .* turns keys otherwise"),
    ("cohere", "layer 0 .* turns keys otherwise"), ("smollm3", r"layer 2 \(smollm3\) has no RoPE"),
    ("exaone4", r"layer 1 \(exaone4\) has no RoPE"), ("opt", "no module with one inv_freq"),
])  # fmt: skip
def test_rope_that_is_not_ours_is_not_undone(kind, why):
    some = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16}
    full = some if kind == "exaone4" else {}
    nope = {"no_rope_layers": [1, 1, 0]} if kind == "smollm3" else {}
    shape = PLAIN if kind == "opt" else SHAPE
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **full, **nope)).eval()
    with pytest.raises(ValueError, match=f"exact-pre undoes RoPE, but .*{why}"):
        KVQCache.from_recipe("exact-pre", model)
    KVQCache.from_recipe("exact", model)


def test_rope_that_reaches_beyond_what_is_stored_of_a_key_is_refused():
    """Of 36 channels, beside values of 28, the first 32 are."""
    turning = {kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
               for kind in ("full_attention", "sliding_attention")}  # fmt: skip
    model = random("mimo_v2_flash", rope_parameters=turning)
    with pytest.raises(ValueError, match="turns 36 channels of a key, of which 32 are stored as keys"):
        KVQCache.from_recipe("exact-pre", model)
    KVQCache.from_recipe("exact", model)


def test_layers_of_other_shapes_are_refused_when_made_or_first_seen():
    model = random_model("llama")
    model.model.layers[2].self_attn.v_proj = torch.nn.Linear(64, 96)
    with pytest.raises(ValueError, match="layer 2 of LlamaForCausalLM are 64 and 96 wide, not 2 heads of 32"):
        KVQCache.from_recipe("exact", model)
    cache = kvq("exact", random_model("llama"))
    with pytest.raises(
        ValueError, match="layer 0 caches values of 2 heads of 16; the configuration says 2 heads of 32"
    ):
        cache.update(torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 5, 16), 0)


def test_artifacts_are_of_models_with_projections():
    model = random_model("llama")
    del model.model.layers[1].self_attn.k_proj
    with pytest.raises(ValueError, match="LlamaAttention has no k_proj; no artifact is of such a model"):
        fingerprint_of(model)


def test_a_projection_in_one_with_others_is_probed_by_its_rows():
    model = random("phi3")
    found, width = fingerprint_of(model), geometry_of(model).width
    for layer, module in enumerate(model.model.layers):
        weight = module.self_attn.qkv_proj.weight
        for place, role in ((1, "key"), (2, "value")):
            rows = weight[len(weight) - (3 - place) * width :][:width]
            probe = found.probes[f"layers.{layer}.{role}.fingerprint.probe"]
            assert torch.equal(probe, fingerprint.probe(rows))


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


def test_a_layer_that_comes_from_another_device_is_refused():
    cache = kvq("exact", random_model("llama"))
    x = torch.zeros(1, 2, 5, 32)
    cache.update(x, x, 0)
    with pytest.raises(ValueError, match="layer 1 is on meta, layer 0 on cpu; kvq needs all layers on one device"):
        cache.update(x.to("meta"), x.to("meta"), 1)


# ---- misuse ----


@pytest.mark.parametrize("make, why", [
    (lambda model: KVQCache.from_recipe("higgs-2bit", "path"), "model is of type str; give the loaded"),
    (lambda model: KVQCache.from_recipe("higgs-2bit", model.config), "model is of type LlamaConfig; give the loaded"),
    (lambda model: KVQCache("higgs-2bit", model), "recipe is of type str; give a Recipe, or its name to from_recipe"),
    (lambda model: KVQCache.from_recipe(model, "higgs-2bit"), "recipe is of type LlamaForCausalLM; give a Recipe"),
    (lambda model: KVQCache.from_recipe(None, model), "recipe is of type NoneType; give a Recipe"),
    (lambda model: KVQCache.from_artifact("name", model), "artifact is of type str; give what load_artifact returns"),
    (lambda model: KVQCache.from_recipe("higgs-2bit", model, health="no"), "health is of type str; give True or False"),
    (lambda model: KVQCache.from_artifact(tiny(), model, strict="no"), "strict is of type str; give True"),
    (lambda model: KVQCache.from_artifact(tiny(), model, 1), "allow_other_weights is of type int; give True or"),
    (lambda model: KVQCache.from_pretrained(7, model), "reference is of type int; give the name of an artifact, or a"),
    (lambda model: PrefixStore(None, "higgs-2bit", model, salt=5), "salt is of type int; give a text"),
    (lambda model: load_artifact(None), "reference is of type NoneType; give the name of an artifact, or a path"),
    (lambda model: load_artifact("name", lock=5), "lock is of type int; give the path of a file that kvq pull --lock"),
    (lambda model: save_pretrained(model, "folder"), "artifact is of type LlamaForCausalLM; give what load_artifact"),
    (lambda model: preset(4), "name is of type int; give that of a recipe, as in preset"),
    (lambda model: fingerprint_of("path"), "model is of type str; give the loaded"),
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


def test_windows_of_layers_that_transformers_holds_are_in_their_masks():
    model, ids = random_model("mistral", "kvq", sliding_window=16), prompt(2, 60)
    with torch.no_grad():
        found = model(ids, past_key_values=stock(model)).logits
        model.set_attn_implementation("sdpa")
        assert torch.equal(found, model(ids, past_key_values=stock(model)).logits)


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


@pytest.mark.parametrize("place", ["layers.1.self_attn.k_proj", "layers.1.feed_forward", "layers.3", "embedding_norm"])
def test_a_pass_that_stops_where_no_layer_has_begun_to_cache_is_seen(place):
    """Below the first layer that a cache holds, or above the last, recurrent ones have taken in a token or not."""
    kinds = ["conv", "full_attention", "full_attention", "conv"]
    model, ids = random("lfm2", layer_types=kinds, num_hidden_layers=4), prompt(2, 60)
    cache = kvq("exact", model)

    def fail(*_):
        raise torch.OutOfMemoryError

    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        hook = model.model.get_submodule(place).register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(ids[:, 40:41], past_key_values=cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a forward pass stopped midway, .* recurrent layers"):
                model(ids[:, 40:41], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, past_key_values=stock(model)).logits)
    KVQCache.unhook(model)
    assert not model.model._forward_hooks and not model.model._forward_hooks_with_kwargs


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
