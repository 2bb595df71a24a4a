"""Small random models of the architectures that docs/models.md lists, and its table."""

import copy
import re
from itertools import takewhile
from pathlib import Path

import torch
from models import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SHARED = {"shared_expert_intermediate_size": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
         "num_hidden_layers": 4, "sliding_window": 16, "use_sliding_window": True}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 3}
OWN = {
    "glm4_moe": EXPERTS | ROUTED,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2}, "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "dots1": EXPERTS | FULL | ROUTED | {"n_shared_experts": 1},
    "minimax_m2": EXPERTS, "afmoe": EXPERTS | {"num_dense_layers": 1},
    "phimoe": EXPERTS, "olmoe": EXPERTS | {"head_dim": 16},
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": None}, "mixtral": EXPERTS, "qwen2_moe": EXPERTS | SHARED, "qwen3_moe": EXPERTS,
    "granitemoe": EXPERTS, "gpt_oss": EXPERTS | FULL, "gemma2": MIXED, "gemma3_text": MIXED, "cohere2": FULL,
    "olmo3": MIXED, "exaone4": FULL | {"sliding_window": None}, "smollm3": {"no_rope_layers": [1, 1, 0]},
    "stablelm": {"head_dim": 16, "partial_rotary_factor": 0.5}, "opt": {"head_dim": 16, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "qwen3_next": EXPERTS | SHARED | {
        "layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}  # fmt: skip


def table() -> list[list[str]]:
    """A row for each model_type: its name, with a + where some layers slide, and the cells of the three columns."""
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| `model_type` ")) + 2
    body = takewhile(lambda line: line.startswith("|"), lines[first:])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    assert all(len(row) == 4 for row in rows)
    kinds = [
        [kind + "+" * ("some slide" in named), *cells]
        for named, *cells in rows
        for kind in re.findall(r"`(\w+)`", named)
    ]
    assert len(kinds) >= 35
    return kinds


def random(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    plain = kind.removesuffix("+")
    given = SHAPE | OWN.get(plain, {}) | (MIXED if plain != kind else {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(plain, **copy.deepcopy(given))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model
