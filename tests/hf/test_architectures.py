"""docs/models.md against small random models of the architectures that it lists: what the table says is so."""

import re
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from generating import kvq, stock
from models import SHAPE, prompt
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvq_calib.model.files import ARCHITECTURES
from kvq_runtime.geometry import SLAB

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16}
FULL = {"layer_types": ["full_attention"] * 3}
OWN = {
    "mistral": {"sliding_window": None}, "mixtral": EXPERTS, "qwen2_moe": EXPERTS | SHARED, "qwen3_moe": EXPERTS,
    "granitemoe": EXPERTS, "gpt_oss": EXPERTS | FULL, "gemma2": MIXED, "gemma3_text": MIXED, "cohere2": FULL,
    "olmo3": MIXED, "exaone4": FULL | {"sliding_window": None}, "smollm3": {"no_rope_layers": [1, 1, 0]},
    "stablelm": {"head_dim": 16, "partial_rotary_factor": 0.5}, "opt": {"head_dim": 16, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "qwen3_next": EXPERTS | SHARED | {
        "layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}  # fmt: skip
CUTS = ((0, 40), (40, 41), (41, 60))


def table() -> list[list[str]]:
    """A row for each model_type: its name, and the cells of the three columns."""
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| `model_type` ")) + 2
    body = takewhile(lambda line: line.startswith("|"), lines[first:])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    assert all(len(row) == 4 for row in rows)
    kinds = [[kind, *cells] for named, *cells in rows for kind in re.findall(r"`(\w+)`", named)]
    assert len(kinds) >= 35
    return kinds


def random(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | OWN.get(kind, {})))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def logits(model, cache, ids) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in CUTS], 1)


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_what_the_table_says(row):
    kind, before, ours, calibrated = row
    model, ids = random(kind), prompt(2, 60)
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
    if ours == "yes":
        found = logits(model, kvq("exact", model), ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))
    else:
        with pytest.raises(ValueError, match="kvq attention does not know " + ours.split("`")[1]):
            logits(model, kvq("exact", model), ids)
    assert (calibrated == "yes") == (type(model).__name__ in ARCHITECTURES)


def rope_is_undone(model) -> bool:
    """Of one token repeated, the first layer's keys before RoPE are the same at every place."""
    cache = kvq("exact-pre", model)
    if 0 not in cache.blocks.held:
        return True
    with torch.no_grad():
        model(torch.full((1, 60), 5), past_key_values=cache)
    store = cache.blocks.layers[0]
    assert 1 < store.blocks < SLAB
    (keys,) = store.fields(0, 1, store.blocks).values()
    k_TC = keys.reshape(-1, keys.shape[-1])
    return bool(torch.allclose(k_TC, k_TC[:1].expand_as(k_TC), rtol=0, atol=1e-3 * float(k_TC.std())))
