"""What a model's own attention reads decoded: latents of all heads (MLA), keys and values of different widths, and keys
that several layers share."""

import pytest
import torch
from architectures import E2B, random
from generating import generate, kvq, padded, stock
from models import SHAPE, prompt
from transformers import PreTrainedModel

from kvq_runtime.geometry import Geometry, joined
from kvq_runtime.hf import CudaGraphs, KVQCache, PrefixStore

JOINED = ["deepseek_v3", "minicpm3", "deepseek_v2", "mimo_v2_flash", "longcat_flash"]
SHARED = ["gemma3n_text", "gemma4_text"]  # Gemma 4 as E2B


def model_of(kind: str) -> PreTrainedModel:
    return random(kind, **(E2B if kind == "gemma4_text" else {}))


@pytest.mark.parametrize("attention", ["own", "kvq"])
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("kind", JOINED + SHARED)
def test_what_is_kept_exactly_generates_as_transformers_cache(kind, way, attention):
    model = model_of(kind)
    ids, mask = padded(prompt(2, 50), 43, 50)
    expected = generate(model, ids, stock(model), way, attention_mask=mask)
    if attention == "kvq":
        model.set_attn_implementation("kvq")
    cache = kvq("exact", model)
    assert torch.equal(generate(model, ids, cache, way, attention_mask=mask), expected)
    assert all(store.encoded for store in cache.blocks.layers.values())


def logits(model: PreTrainedModel, cache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 90), (90, 91), (91, 120))], 1
        )


def test_the_newest_queries_of_layers_that_share_keys():
    """Asked for a few logits, layers that share keys get as many queries, and all keys."""
    model, ids = model_of("gemma4_text"), prompt(2, 120)
    expected = logits(model, stock(model), ids)
    model.set_attn_implementation("kvq")
    with torch.no_grad():
        found = model(ids, past_key_values=kvq("exact", model), logits_to_keep=5).logits
    torch.testing.assert_close(found, expected[:, -5:], rtol=0, atol=1e-3 * float(expected.std()))


@pytest.mark.parametrize("kind", JOINED + SHARED)
def test_few_bits_are_near(kind):
    model, ids = model_of(kind), prompt(2, 120)
    expected, errors = logits(model, stock(model), ids), {}
    for name in ("kivi-4bit", "higgs-4bit", "rtn-8bit", "rtn-2bit"):
        cache = kvq(name, model)
        found = logits(model, cache, ids)
        assert all(store.encoded for store in cache.blocks.layers.values()), name
        errors[name] = float((found - expected).norm() / expected.norm())
    assert errors["rtn-8bit"] < 0.02 and errors["rtn-8bit"] < errors["rtn-2bit"] > errors["kivi-4bit"] > 0, errors
    assert max(errors["kivi-4bit"], errors["higgs-4bit"]) < 0.3, errors


@pytest.mark.parametrize(
    "kind, size",
    [("deepseek_v3", 3 * (48 + 16)), ("longcat_flash", 2 * 2 * (48 + 16)), ("mimo_v2_flash", 2 * 2 * (36 + 28))],
)
def test_a_token_takes_what_transformers_caches_of_it(kind, size):
    """As many elements as transformers' own cache has, and no expanded head among them."""
    model, ids = random(kind), prompt(2, 60)
    own, cache = stock(model), KVQCache.from_recipe("exact", model)
    with torch.no_grad():
        model(ids, past_key_values=own)
        model(ids, past_key_values=cache)
    report = cache.memory_report()
    elements = sum(x.numel() for n in cache.places for x in (own.layers[n].keys, own.layers[n].values))
    assert elements == 2 * 60 * size and report.exact_bytes == 2 * elements + report.sliding_bytes
    parts = own.layers[1].keys, own.layers[1].values
    row = torch.cat(parts if kind == "mimo_v2_flash" else parts[::-1], -1)[0].transpose(0, 1)
    stored = [x[0, :60].unflatten(-1, (row.shape[1], -1)) for x in cache.blocks.layers[cache.places[1]].window_2BTC]
    assert torch.equal(torch.cat(stored, -1), row)


@pytest.mark.parametrize("left", [{"v_head_dim": 0}, {"v_head_dim": 32}, {"v_head_dim": 16, "head_dim": None}])
def test_widths_that_a_file_says_of_latents_that_a_model_does_not_have(left):
    """As files of DeepSeek-OCR do."""
    config = SHAPE | {"kv_lora_rank": None, "qk_rope_head_dim": 0} | left
    assert joined(config) is None and Geometry.from_config(config) == Geometry(3, 2, config["head_dim"] or 16)


@pytest.mark.parametrize("kind, why", [
    ("deepseek_v3", "decoded latents"), ("mimo_v2_flash", "decoded keys and values of different widths"),
    ("gemma3n_text", "the last layers of"),
])  # fmt: skip
def test_what_reads_packed_codes_or_weights_is_refused(kind, why, tmp_path):
    model = model_of(kind)
    for name in ("h2o", "snapkv"):
        with pytest.raises(ValueError, match=f"{name} needs queries or weights of attention, and .*{why}"):
            kvq(name, model)
    assert why in str(kvq("exact", model).refusal)
    with pytest.raises(ValueError, match="no prefix is kept" if kind == "deepseek_v3" else "do not attend to all"):
        PrefixStore(tmp_path, "higgs-4bit", model)
    model.set_attn_implementation("kvq")
    with CudaGraphs(model) as graphs:
        generate(model, prompt(1, 30), kvq("exact", model))
        assert not graphs.recorded and (why in str(graphs.reason) or "transformers' own classes" in str(graphs.reason))
