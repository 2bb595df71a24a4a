"""Small random models of the families that kvq serves."""

import copy
from typing import Any

import torch
from models import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SHARED = {"shared_expert_intermediate_size": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
         "num_hidden_layers": 4, "sliding_window": 16, "use_sliding_window": True}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 3}
RECURRENT = {"layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_value_heads": 2,
             "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
SEEING = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
          "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14}  # fmt: skip
WIDER = {"head_dim": 64, "num_key_value_heads": 1}  # of Gemma 4, where all tokens are attended to
GEMMA4 = EXPERTS | {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 16,
    "per_layer_config": {"1": WIDER, "3": WIDER}, "attention_k_eq_v": True, "enable_moe_block": True,
    "top_k_experts": 2, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0,
}  # fmt: skip
E2B = {  # of Gemma 4, whose last layers read what others cache
    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 16,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    "per_layer_config": {str(n): WIDER for n in (1, 3, 5)}, "enable_moe_block": False,
}  # fmt: skip


def tower(text: dict[str, Any], **seeing: Any) -> dict[str, Any]:
    """Settings of a model of images and text."""
    return {"text_config": SHAPE | text, "vision_config": SEEING | seeing}


OWN = {
    "mistral": {"sliding_window": None}, "ministral3": {"sliding_window": None}, "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS | SHARED, "qwen3_moe": EXPERTS, "glm4_moe": EXPERTS | ROUTED, "gpt_oss": EXPERTS | FULL,
    "gemma2": MIXED, "gemma3_text": MIXED, "gemma3": tower(MIXED) | {"mm_tokens_per_image": 1}, "olmo3": MIXED,
    "gemma4_text": GEMMA4, "gemma4": tower(GEMMA4, head_dim=16, global_head_dim=16),
    "smollm3": {"no_rope_layers": [1, 1, 0]}, "qwen3_next": EXPERTS | SHARED | RECURRENT, "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": EXPERTS | SHARED | RECURRENT, "qwen3_5": tower(RECURRENT),
    "qwen3_5_moe": tower(EXPERTS | SHARED | RECURRENT),
}  # fmt: skip
QUICK = ("llama", "qwen2", "phi3", "smollm3", "gemma3", "gemma4_text", "gpt_oss", "qwen3_next", "glm4_moe")


def random(kind: str, **settings: Any) -> PreTrainedModel:
    """A model of a type with weights large enough that its choices are not ties; `settings` beside those of OWN."""
    torch.manual_seed(0)
    own = OWN.get(kind, {})
    given = own if "text_config" in own else SHAPE | own | settings
    config = AutoConfig.for_model(kind, **copy.deepcopy(given))
    made = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    model = made.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model
