"""docs/models.md against small random models of the architectures that it lists: what the table says is so."""

import copy
import json
import pickle
import re
from typing import Any

import pytest
import torch
from architectures import FALCONS, QUICK, random, table
from generating import generate, kvq, padded, stock
from models import prompt
from tiers import some
from transformers import DeepseekV4ForCausalLM
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvq_runtime.artifact import fingerprint
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import SLAB, Geometry, Sliding, looped
from kvq_runtime.hf.cuda_graphs import Asked
from kvq_runtime.hf.model import (
    CACHE,
    attention_of,
    decoder_of,
    fingerprint_of,
    layers_of,
    looks_ahead,
    real_tokens,
    settings_of,
)
from kvq_runtime.hf.prefix import PrefixStore
from kvq_runtime.store.held import Sizes

ROWS = {kind: cells for kind, *cells in table()}
CUTS = ((0, 40), (40, 41), (41, 60))
CHOOSING = (
    "deepseek_v32", "glm5_next", "axk2", "glm_moe_dsa", "dots3_note_text", "hy_v4", "mistral_large4", "qwen4_exp_text",
)  # fmt: skip


def logits(model, cache, ids) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[:, a:b], **{CACHE: cache}).logits for a, b in CUTS], 1)


@pytest.mark.parametrize("kind", some(ROWS, *QUICK))
def test_what_the_table_says(kind):
    before, ours, _ = ROWS[kind]
    model, ids = random(kind), prompt(2, 60)
    if kind == "inkling_text":  # to whose scores is added, which sdpa rounds by how keys lie in memory
        model.set_attn_implementation("eager")
    expected = logits(model, stock(model), ids)
    cache = kvq("exact", model)
    assert torch.equal(logits(model, cache, ids), expected)
    assert all(store.blocks for store in cache.blocks.layers.values())
    if before == "yes":
        cache = kvq("exact-pre", model)
        torch.testing.assert_close(logits(model, cache, ids), expected, rtol=0, atol=1e-3 * float(expected.std()))
        assert rope_is_undone(model)
    else:
        with pytest.raises(ValueError, match="exact-pre undoes RoPE, but"):
            kvq("exact-pre", model)
    model.set_attn_implementation("kvq")
    if ours in ("yes", "decoded"):
        found = logits(model, kvq("exact", model), ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))
    else:
        with pytest.raises(ValueError, match="kvq attention does not know " + ours.split("`")[1]):
            logits(model, kvq("exact", model), ids)


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


# not MiniMax M3, whose queries behind padding see nothing but padding
@pytest.mark.parametrize("kind", ["gpt_neox", "dbrx", "gptj", "gpt_bigcode", "granitemoehybrid", "bloom",
                                  "persimmon", "falcon_h1", "zamba2", "zaya", "jamba",
                                  "nemotron_h", "mimo_v2_flash", "longcat_flash", "dory", *FALCONS,
                                  *CHOOSING])  # fmt: skip
def test_padded_rows_and_beams(kind):
    """`exact` generates what transformers' cache does, and four bits stay close."""
    model = random(kind)
    ids, mask = padded(prompt(3), 40, 33, 3)
    for way in ("greedy", "beams"):
        one, two = (
            generate(model, ids, made, way, attention_mask=mask) for made in (kvq("exact", model), stock(model))
        )
        assert torch.equal(one, two), way
    cache = kvq("exact", model)
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE: cache})
    assert torch.equal(cache.blocks.positions.real_BT, mask.bool()), "it is told of padding"
    ids, found = prompt(2, 60), []
    for cache in (stock(model), kvq("higgs-4bit", model)):
        found.append(logits(model, cache, ids)[:, 40:])
    near = 0.3 if kind in CHOOSING else 0.2  # another choice of tokens, or of experts, is far from the first
    assert 0 < float((found[1] - found[0]).norm() / found[0].norm()) < near


@pytest.mark.parametrize("kind, settings", [
    *((kind, {}) for kind in ("gpt_neox", "dbrx", "phi3", "falcon", "falcon+", "falcon=", "gpt2", "gpt_bigcode")),
    ("gpt_bigcode", {"multi_query": False}),
])  # fmt: skip
def test_the_rows_of_one_projection_that_make_keys_and_values(kind, settings):
    """By the first token's keys, which RoPE does not turn, and its values, as transformers' cache gets them."""
    model, seen = random(kind, **settings), []
    module = attention_of(layers_of(decoder_of(model))[0])
    (fused,) = (name for name in fingerprint.FUSED if hasattr(module, name))
    projection, cache = getattr(module, fused), stock(model)
    projection.register_forward_hook(lambda _module, given, _out: seen.append(given[0]))
    with torch.no_grad():
        model(prompt(1, 1), past_key_values=cache)
    config, layer = settings_of(model.config), cache.layers[0]
    for name, cached in (("k_proj", layer.keys), ("v_proj", layer.values)):
        made = fingerprint.of_fused(projection.weight.detach(), config, fused, name) @ seen[0].flatten()
        made = made.clamp(-2, 2) if kind == "dbrx" else made
        made = made.unflatten(0, (-1, cached.shape[-1]))
        torch.testing.assert_close(made.repeat_interleave(cached.shape[1] // len(made), 0), cached[0, :, 0])


@pytest.mark.parametrize("kind, keys, values", [
    ("ctrl", "Wk", "Wv"), ("zaya", "qkv_proj.k_proj", "qkv_proj.v_proj_current"),
])  # fmt: skip
def test_a_model_is_known_by_projections_of_other_names(kind, keys, values):
    """It is another one if either is."""
    model = random(kind)
    before, module = fingerprint_of(model), attention_of(layers_of(decoder_of(model))[1])
    for name, said in ((keys, "key"), (values, "value")):
        weight = module.get_submodule(name).weight
        assert torch.equal(before.probes[f"layers.1.{said}.fingerprint.probe"], fingerprint.probe(weight))
        with torch.no_grad():
            weight.neg_()
        with pytest.raises(ArtifactError, match=f"weights of layer 1 {said} differ by 2 of their norm"):
            fingerprint.check_match(before, fingerprint_of(model))
        with torch.no_grad():
            weight.neg_()


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "qwen2_5_vl", "qwen3_5", "llava"])
@pytest.mark.parametrize("name", ["exact", "exact-pre"])
def test_padded_text_beside_images(kind, name):
    """A model of images hands its decoder other masks and positions: padded rows come out as alone."""
    model, ids, mask = random(kind), prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    if name == "exact-pre" and kind in ("qwen3_vl", "qwen2_5_vl"):
        places = places.expand(4, 2, 60)  # of text, then of time, height and width, as `generate` gives them
    cache, other = kvq(name, model), stock(model)
    with torch.no_grad():
        for a, b in CUTS:
            given = {"attention_mask": mask[:, :b], "position_ids": places[..., a:b]}
            found, wanted = (model(ids[:, a:b], past_key_values=one, **given).logits for one in (cache, other))
            real = mask[:, a:b].bool()
            torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=1e-3 * float(wanted.std()))
    assert cache.blocks.positions.real_BT is not None and cache.memory_report().tokens == 60


@pytest.mark.parametrize("kind", ["falcon_h1", "zaya"])
def test_layers_that_recur_are_not_kept_or_recorded(kind):
    """Not even where every layer attends, too."""
    model = random(kind)
    model.set_attn_implementation("kvq")
    with pytest.raises(ValueError, match="or recur as well"):
        PrefixStore(None, "exact", model)
    cache = kvq("rtn-2bit", model)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
    step = {"input_ids": prompt(1, 1), "position_ids": torch.tensor([[60]]), CACHE: cache}
    reason = Asked(model, step).refused(cache)
    assert "recurrent" in str(reason) or "transformers' own classes" in str(reason)
    with pytest.raises(RuntimeError, match="not offloaded"):
        cache.layers[-1].offload()


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1"])
def test_the_state_of_recurrent_layers_is_counted(kind):
    """Of those that attend too; and it is forgotten, so that other rows may follow."""
    model, ids = random(kind), prompt(2, 60)
    cache = kvq("exact", model)
    expected = logits(model, cache, ids)
    cache.reset()
    assert torch.equal(logits(model, cache, ids), expected)
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


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "qwen4_exp_text"])
def test_the_keys_of_an_indexer_go_with_the_rows(kind):
    """They are those of transformers' cache after all that can be done to one, and are counted."""
    model, ids = random(kind), prompt(2, 40)
    ours, other = kvq("exact", model), stock(model)

    def same(ids) -> bool:
        found = []
        for cache in (ours, other):
            with torch.no_grad():
                found.append(model(ids, past_key_values=cache).logits)
        held = [[getattr(layer, "indexer_keys", None) for layer in cache.layers] for cache in (ours, other)]
        assert all(one is None if two is None else torch.equal(one, two) for one, two in zip(*held, strict=True))
        keys = sum(one.untyped_storage().nbytes() for one in held[0] if one is not None)
        assert 0 < keys <= ours.memory_report().sliding_bytes
        return torch.equal(*found)

    assert same(ids) and same(ids[:, :3])
    for method, given, rows in (
        ("crop", -9, 2), ("batch_repeat_interleave", 2, 4), ("reorder_cache", torch.tensor([3, 0, 0, 1]), 4),
        ("batch_select_indices", torch.tensor([2, 0]), 2),
    ):  # fmt: skip
        if "qwen4" in kind and method != "reorder_cache":  # whose recurrent layers refuse it
            with pytest.raises(RuntimeError, match="recurrent layers"):
                getattr(ours, method)(given)
            continue
        given = given if rows == 2 or method != "reorder_cache" or "qwen4" not in kind else torch.tensor([1, 0])
        for cache in (ours, other):
            getattr(cache, method)(given)
        assert same(prompt(2 if "qwen4" in kind else rows, 5)), method
    if "qwen4" not in kind:
        handle = layers_of(decoder_of(model))[1].register_forward_hook(lambda *_given: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(ids[:, :4], past_key_values=ours)
        handle.remove()
        assert same(ids[:, :4]), "a pass that stopped midway is undone"
    again = copy.deepcopy(ours)
    with torch.no_grad():
        assert torch.equal(*(model(ids[:, :5], past_key_values=cache).logits for cache in (again, ours)))
    ours.reset()
    other = stock(model)
    assert same(prompt(3, 20)), "reset"


@pytest.mark.parametrize("kind", [*CHOOSING, "minimax_m3_vl_text", "mimo_v2_flash"])
def test_what_stands_beside_blocks_is_predicted(kind):
    """By the configuration, in 16 bits: the keys of an indexer, what slides; a fingerprint says it again."""
    model, ids = random(kind), prompt(2, 41)
    cache = kvq("rtn-4bit", model)
    with torch.no_grad():
        for part in ids.split((40, 1), 1):
            model(part, past_key_values=cache)
    names = "keys", "values", "indexer_keys", "indexer_position_ids"
    held = [one for layer in cache.layers for name in names if (one := getattr(layer, name, None)) is not None]
    sizes = [one.untyped_storage().nbytes() // (2 if one.dtype == torch.float32 else 1) for one in held]
    sliding = Sliding.from_config(settings_of(model.config.get_text_config(decoder=True)))
    assert bool(sliding.indexed) == ("mimo" not in kind) and 2 * sliding.bytes(41) == sum(sizes)
    found = fingerprint_of(model)
    again = fingerprint.from_json(json.loads(json.dumps(found.to_json())), found.probes)
    assert found.sliding == again.sliding == sliding and found.attending == again.attending


@pytest.mark.parametrize("read", [0, 40])
def test_positions_of_a_pass_that_stopped_midway_are_undone(read):
    """Of a model that takes them in before any layer runs; the pass that follows has another length."""
    model, ids = random("qwen4_exp_text", layer_types=["indexed_attention"] * 3), prompt(1, 60)
    ours, other = kvq("exact", model), stock(model)
    with torch.no_grad():
        for cache in (ours, other) if read else ():
            model(ids[:, :read], past_key_values=cache)
        handle = layers_of(decoder_of(model))[1].register_forward_hook(lambda *_given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, read : read + 4], past_key_values=ours)
        handle.remove()
        found = [model(ids[:, read : read + 9], past_key_values=cache).logits for cache in (ours, other)]
    assert torch.equal(*found)
    assert torch.equal(*(cache.layers[0].indexer_position_ids for cache in (ours, other)))


@pytest.mark.parametrize("kind, settings, why", [
    ("deepseek_v32", {}, "caches latents, of which no prefix is kept"),
    ("qwen4_exp_text", {"layer_types": ["indexed_attention"] * 3}, "keys of an indexer, of which no prefix is kept"),
])  # fmt: skip
def test_the_keys_of_an_indexer_are_not_kept_or_recorded(kind, settings, why):
    model = random(kind, **settings)
    with pytest.raises(ValueError, match=why):
        PrefixStore(None, "exact", model)
    model.set_attn_implementation("kvq")
    cache = kvq("rtn-2bit", model)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
    step = {"input_ids": prompt(1, 1), "position_ids": torch.tensor([[60]]), CACHE: cache}
    assert re.search("decoded latents|chooses the tokens that a query reads", str(Asked(model, step).refused(cache)))
    with pytest.raises(ValueError, match="needs queries or weights of attention"):
        kvq("h2o-higgs-2bit", model)


@pytest.mark.parametrize("kind, why", [
    ("mistral_large4", "has layers that read the latents of another one"),
    ("qwen4_exp_text", "keeps positions where transformers"),
    ("minimax", "takes no cache but its own MiniMaxCache"),
    ("deepseek_v4", "keeps entries where transformers"),
    ("dory", "reads keys and values of a layer before that caches them"),
])  # fmt: skip
def test_indexers_of_which_a_cache_would_be_wrong(kind, why, monkeypatch):
    model = random(kind)
    if kind == "qwen4_exp_text":
        monkeypatch.setattr("kvq_runtime.hf.model.DynamicIndexedLayer", dict)
    if kind == "deepseek_v4":
        monkeypatch.setattr("kvq_runtime.hf.model.DeepseekV4CSACache", dict)
    if kind == "dory":
        model.config.recurrent_kv_cache_mode = "last_loop"
    if kind == "mistral_large4":
        model.config.text_config.kv_source_layers = [0, 0, 2]
    with pytest.raises(ValueError, match=why + ".*models.md"):
        kvq("exact", model)


@pytest.mark.parametrize("kind, layers, slide", [
    ("dory", [0, 2, 5, 3], 2), ("inkling2_loop_text", [0, 2, 5, 7, 3], 3),
])  # fmt: skip
def test_layers_that_a_pass_goes_through_again(kind, layers, slide, tmp_path):
    """Each time as another layer of the cache, behind those of the model, and numbered as they come; a file of the
    configuration says it, too."""
    model, ids = random(kind), prompt(1, 60)
    cache, settings = kvq("rtn-4bit", model), settings_of(model.config)
    in_passes(model, cache, ids, 40, 20)
    assert [*cache.places] == layers and len(cache.layers) == len(stock(model).layers) + 2 * slide - 2
    model.config.save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    assert Geometry.from_config(given) == cache.blocks.geometry and len(cache.blocks.layers) == len(layers)
    assert Sliding.from_config(given) == Sliding.from_config(settings) and Sliding.from_config(given).layers == slide
    if kind == "dory":
        found = fingerprint_of(model)
        assert fingerprint.from_json(json.loads(json.dumps(found.to_json())), found.probes) == found
        assert found.attending == (0, 2, 4, 5)


@pytest.mark.parametrize("name, value", [
    ("n_recurrent_loops", 10**9), ("n_recurrent_loops", "2"), ("n_recurrent_loops", -1), ("n_input_layers", None),
    ("n_output_layers", -3), ("n_output_layers", 10**6), ("num_hidden_layers", None),
])  # fmt: skip
def test_passes_that_no_model_makes_are_refused(name, value):
    given = {"num_hidden_layers": 8, "n_input_layers": 2, "n_output_layers": 2, "n_recurrent_loops": 3}
    assert looped(given) == [2, 3, 4, 5, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=f"{name}={value!r}.*whole numbers are needed"):
        looped(given | {name: value})


# ---- DeepSeek V4, whose layers cache one entry for some tokens ----


def in_passes(model, cache, ids, *lengths: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(part, **{CACHE: cache}).logits for part in ids.split(lengths, 1)], 1)


@pytest.mark.parametrize("lengths", [(100, 1, 1, 1, 37), (1, 1, 1, 70, 1, 66)])
def test_entries_of_several_tokens(lengths):
    """They end where they end, whatever a pass reads; `exact` has transformers' logits, of other rows too, and four
    bits are close to them."""
    model, ids = random("deepseek_v4"), prompt(2, 140)
    ours, other, four = kvq("exact", model), stock(model), kvq("higgs-4bit", model)
    expected = in_passes(model, other, ids, *lengths)
    assert torch.equal(in_passes(model, ours, ids, *lengths), expected)
    assert all(store.blocks == 3 for store in ours.blocks.layers.values()) and ours.get_seq_length() == 140
    found = in_passes(model, four, ids, *lengths)[:, -37:]
    assert 0 < float((found - expected[:, -37:]).norm() / expected[:, -37:].norm()) < 0.3
    for rows in (torch.tensor([1, 1, 0]), torch.tensor([2, 0])):
        for cache in (ours, other):
            cache.reorder_cache(rows)
        more = prompt(len(rows), 5)
        again = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
        expected = in_passes(model, other, more, 2, 3)
        assert torch.equal(in_passes(model, ours, more, 2, 3), expected)
        assert torch.equal(in_passes(model, again, more, 2, 3), expected)
    ours.reset()
    assert torch.equal(in_passes(model, ours, prompt(3), 40), in_passes(model, stock(model), prompt(3), 40))


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "chunked"])
def test_padded_rows_of_a_model_with_entries(way):
    model = random("deepseek_v4")
    ids, mask = padded(prompt(3), 40, 33, 3)
    one, two = (generate(model, ids, made, way, attention_mask=mask) for made in (kvq("exact", model), stock(model)))
    assert torch.equal(one, two)


@pytest.mark.parametrize("scaled", [{}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0,
                                         "original_max_position_embeddings": 64}}])  # fmt: skip
def test_the_rope_of_entries_is_undone(scaled):
    """Those of one token repeated are the same at every place, but the first, for which there is none before."""
    model = random("deepseek_v4", **scaled)
    cache = kvq("exact-pre", model)
    in_passes(model, cache, torch.full((1, 120), 5), 100, 1, 19)
    store = cache.blocks.layers[0]  # the second of the model: below it is a window alone
    (keys,) = store.fields(0, 1, store.blocks).values()
    k_TC = keys.reshape(-1, keys.shape[-1])[1:]
    assert len(k_TC) == 31 and model.model.rotary_emb.compress_inv_freq.max() > 0.5
    torch.testing.assert_close(k_TC, k_TC[:1].expand_as(k_TC), rtol=0, atol=1e-4 * float(k_TC.std()))


def test_bytes_beside_entries_are_predicted(tmp_path):
    """At every length, what is held of tokens that are yet to make an entry, too."""
    random("deepseek_v4").save_pretrained(tmp_path)
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cache, stamp = kvq("higgs-4bit", model), fingerprint_of(model)
    stamp = fingerprint.from_json(json.loads(json.dumps(stamp.to_json())), stamp.probes)
    sizes = Sizes(cache.blocks.recipe, stamp.geometry, sliding=stamp.sliding)
    ids = prompt(2, 130)
    in_passes(model, cache, ids[:, :1], 1)
    for token in ids[:, 1:].split(1, 1):
        in_passes(model, cache, token, 1)
        report, held = cache.memory_report(), sizes.at(cache.get_seq_length(), 2)
        assert (report.tokens, report.total_bytes, report.exact_bytes, report.sliding_bytes) == (
            held.tokens, held.total, held.exact, held.sliding)  # fmt: skip
    assert report.kept == 130 and report.parts["codes"] and str(report).startswith("higgs-4bit: 130 tokens x 2 rows")
    start = report.smaller_than_16bit_from
    assert start == sizes.smaller_from(2) and held.bits > held.own_bits > 4
    here, before = sizes.at(start, 2), sizes.at(start - 1, 2)
    assert here.total < here.exact and before.total >= before.exact
    assert sizes.at(1).exact == sizes.at(1).sliding and sizes.at(1).bits > 0  # of no entry yet


def test_what_a_cache_with_entries_does_not_do():
    model = random("deepseek_v4")
    cache = kvq("higgs-4bit", model)
    in_passes(model, cache, prompt(2, 70), 70)
    for method, given in (("crop", -3), ("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))):
        with pytest.raises(RuntimeError, match="layers that pool tokens, whose state cannot be taken apart; reset()"):
            getattr(cache, method)(given)
    with pytest.raises(ValueError, match="needs queries or weights of attention"):
        kvq("h2o-higgs-2bit", model)
    with pytest.raises(ValueError, match="do not attend to all tokens, or recur as well"):
        PrefixStore(None, "exact", model)
    model.set_attn_implementation("kvq")  # before anything has changed
    with pytest.raises(ValueError, match="kvq attention does not know entries"):
        in_passes(model, cache, prompt(2, 1), 1)
    model.set_attn_implementation("eager")
    in_passes(model, cache, prompt(2, 1), 1)
    with pytest.raises(ValueError, match="the cache holds 71 tokens, and the prompt has none beyond them"):
        in_passes(model, cache, prompt(2, 0), 0)
    handle = layers_of(decoder_of(model))[2].register_forward_hook(lambda *_given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        in_passes(model, cache, prompt(2, 4), 4)
    handle.remove()
    with pytest.raises(RuntimeError, match="has changed the state of layers that pool tokens"):
        in_passes(model, cache, prompt(2, 4), 4)


def test_masks_of_models_of_images():
    """Padding is read from the newest query's row; a token that sees a later one is told from causal ones."""
    mask = torch.ones(2, 1, 4, 6).tril(2).bool()
    mask[0, :, :, 0] = False
    least = torch.finfo(torch.float32).min
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, least)):
        real: Any = real_tokens({"full_attention": given}, 6)
        assert real.tolist() == [[False] + [True] * 5, [True] * 6]
        assert not looks_ahead({"full_attention": given}, 4)
    mask[1, 0, 0, 4] = True
    assert looks_ahead({"full_attention": mask}, 4) and not looks_ahead({"full_attention": None}, 4)
    flat = torch.tensor([[0, 1, 1, 1]])
    real = real_tokens({"full_attention": flat}, 2)
    assert real.tolist() == [[True, True]]
    assert real_tokens({"full_attention": None}, 2) is real_tokens(None, 2) is None
    with pytest.raises(RuntimeError, match="use sdpa or eager"):
        real_tokens({"full_attention": object()}, 2)
