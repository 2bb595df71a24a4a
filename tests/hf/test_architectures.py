"""Small random models of the families that kvq serves, and of others, which are refused or served untested."""

import json
from typing import Any

import pytest
import torch
from architectures import E2B, MIXED, QUICK, random
from generating import kvq, stock
from models import SHAPE, prompt
from tiers import some
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvq_runtime.artifact import fingerprint
from kvq_runtime.families import FAMILIES, lists_layers
from kvq_runtime.geometry import SLAB, Geometry, Sliding
from kvq_runtime.hf.cuda_graphs import step_refusal
from kvq_runtime.hf.model import CACHE, fingerprint_of, geometry_of, real_tokens, settings_of
from kvq_runtime.prefix.transformers import PrefixStore

CUTS = ((0, 40), (40, 41), (41, 60))


def logits(model, cache, ids) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[:, a:b], **{CACHE: cache}).logits for a, b in CUTS], 1)


def near(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))


@pytest.mark.parametrize("kind", some(FAMILIES, *QUICK))
def test_what_the_table_says(kind):
    model, ids = random(kind), prompt(2, 60)
    expected = logits(model, stock(model), ids)
    cache = kvq("exact", model)
    assert torch.equal(logits(model, cache, ids), expected)
    assert all(store.blocks for store in cache.blocks.layers.values())
    if FAMILIES[kind].rope == "some layers":
        with pytest.raises(ValueError, match=r"exact-pre undoes RoPE, but layer 2 \(smollm3\) has no RoPE"):
            kvq("exact-pre", model)
    else:
        near(logits(model, kvq("exact-pre", model), ids), expected)
        assert rope_is_undone(model)
    model.set_attn_implementation("kvq")
    near(logits(model, kvq("exact", model), ids), expected)


def rope_is_undone(model) -> bool:
    """Of one token repeated, the first layer's keys before RoPE are the same at every place."""
    cache = kvq("exact-pre", model)
    if 0 not in cache.places:
        return True
    with torch.no_grad():
        model(torch.full((1, 60), 5), **{CACHE: cache})
    store = cache.blocks.layers[0]
    assert 1 < store.blocks < SLAB
    (keys,) = store.fields(0, 1, store.blocks).values()
    k_TC = keys.reshape(-1, keys.shape[-1])
    return bool(torch.allclose(k_TC, k_TC[:1].expand_as(k_TC), rtol=0, atol=1e-3 * float(k_TC.std())))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_configuration_says_what_its_model_has(kind):
    """And the fingerprint says it again; a file that leaves layers to transformers is refused, never misread."""
    model = random(kind)
    text = model.config.get_text_config(decoder=True)
    settings, found = settings_of(text), fingerprint_of(model)
    given = json.loads(json.dumps(text.to_dict()))
    assert Geometry.from_config(given) == geometry_of(model)
    assert Sliding.from_config(settings) == found.sliding
    assert fingerprint.from_json(json.loads(json.dumps(found.to_json())), found.probes) == found
    assert [*kvq("exact", model).places] == list(found.attending or range(settings["num_hidden_layers"]))
    if given.pop("layer_types", None) is not None and not lists_layers(given):
        with pytest.raises(ValueError, match=f"{given['model_type']} has no layer_types; read it by AutoConfig"):
            Geometry.from_config(given)
    else:
        assert Geometry.from_config(given) == geometry_of(model)


def test_last_layers_that_read_what_others_cache():
    """Gemma 4's E2B: under any attention they read what is decoded, and recipes that need queries are refused."""
    model, ids = random("gemma4_text", **E2B, attention_k_eq_v=False), prompt(2, 60)
    expected = logits(model, stock(model), ids)
    for attention in ("sdpa", "kvq"):
        model.set_attn_implementation(attention)
        cache = kvq("exact", model)
        near(logits(model, cache, ids), expected)
    assert [*cache.places] == [1, 3] and "the last layers of" in cache.refusal
    with pytest.raises(ValueError, match="h2o needs queries or weights of attention, and the last layers of"):
        kvq("h2o", model)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("name", ["exact", "exact-pre"])
def test_padded_text_beside_images(kind, name):
    """A model of images hands its decoder other masks and positions: padded rows come out as alone."""
    model, ids, mask = random(kind), prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, other = kvq(name, model), stock(model)
    with torch.no_grad():
        for a, b in CUTS:
            given = {"attention_mask": mask[:, :b], "position_ids": places[..., a:b]}
            found, wanted = (model(ids[:, a:b], past_key_values=one, **given).logits for one in (cache, other))
            real = mask[:, a:b].bool()
            torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=1e-3 * float(wanted.std()))
    assert cache.blocks.positions.real_BT is not None and cache.memory_report().tokens == 60


def test_layers_that_recur_are_not_kept_or_recorded():
    model = random("qwen3_next")
    model.set_attn_implementation("kvq")
    with pytest.raises(ValueError, match="do not attend to all tokens"):
        PrefixStore("never made", "exact", model)
    cache = kvq("rtn-2bit", model)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
    step = {"input_ids": prompt(1, 1), "position_ids": torch.tensor([[60]]), CACHE: cache}
    assert "transformers' own classes" in str(step_refusal(model, step))
    with pytest.raises(RuntimeError, match="not offloaded"):
        cache.layers[-1].offload()


def test_the_state_of_recurrent_layers_is_counted():
    """And forgotten, so that other rows may follow."""
    model, ids = random("qwen3_next"), prompt(2, 60)
    cache = kvq("exact", model)
    expected = logits(model, cache, ids)
    for rows in (1, 3):
        cache.reset()
        assert torch.equal(logits(model, cache, prompt(rows, 60)), logits(model, stock(model), prompt(rows, 60)))
    cache.reset()
    assert torch.equal(logits(model, cache, ids), expected)
    layer, report = cache.layers[0], cache.memory_report()
    states = [one for held in (layer.conv_states, layer.recurrent_states)
              for one in (held.values() if isinstance(held, dict) else [held])]  # fmt: skip
    of = sum(isinstance(one, LinearAttentionCacheLayerMixin) for one in cache.layers)
    assert report.sliding_bytes == of * sum(one.untyped_storage().nbytes() for one in states) > 0


def unlisted(kind: str, **settings: Any):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | settings)).eval()


@pytest.mark.parametrize("settings", [{}, MIXED])
def test_a_standard_cache_of_another_family_is_served_untested(settings):
    """By recipes after RoPE that need no fit, with a warning; our attention reads it decoded."""
    model, ids = unlisted("cohere2", **{"layer_types": ["full_attention"] * 3} | settings), prompt(2, 60)
    expected = logits(model, stock(model), ids)
    for attention in ("sdpa", "kvq"):
        model.set_attn_implementation(attention)
        with pytest.warns(UserWarning, match="'cohere2' is not a family that kvq serves; .*exact was not tested"):
            cache = kvq("exact", model)
        near(logits(model, cache, ids), expected)
    assert "was not tested" in cache.refusal
    for name in ("exact-pre", "aqua-2bit", "h2o"):
        with pytest.raises(ValueError, match="'cohere2' is not a family .*use a model of llama, .*or a recipe after"):
            kvq(name, model)
    with pytest.raises(ValueError, match="'cohere2' is not a family"):
        fingerprint_of(model)


@pytest.mark.parametrize("kind, settings", [
    ("deepseek_v3", {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
                     "q_lora_rank": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ("gemma3n_text", {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
                      "sliding_window": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                      "vocab_size_per_layer_input": 97, "head_dim": 16, "altup_num_inputs": 2, "laurel_rank": 8,
                      "intermediate_size": [128] * 6, "activation_sparsity_pattern": [0.0] * 6}),
])  # fmt: skip
def test_other_caches_are_refused_by_name(kind, settings):
    with pytest.raises(ValueError, match=f"'{kind}' is not a family that kvq serves; use a model of llama, "):
        kvq("exact", unlisted(kind, **settings))


def test_masks_of_models_of_images():
    """Padding is read from the newest query's row."""
    mask = torch.ones(2, 1, 4, 6).tril(2).bool()
    mask[0, :, :, 0] = False
    least = torch.finfo(torch.float32).min
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, least)):
        real: Any = real_tokens({"full_attention": given}, 6)
        assert real.tolist() == [[False] + [True] * 5, [True] * 6]
    flat = torch.tensor([[0, 1, 1, 1]])
    real = real_tokens({"full_attention": flat}, 2)
    assert real.tolist() == [[True, True]]
    assert real_tokens({"full_attention": None}, 2) is real_tokens(None, 2) is None
    with pytest.raises(RuntimeError, match="use sdpa or eager"):
        real_tokens({"full_attention": object()}, 2)
