"""Random models of the supported architectures, small enough to generate with in milliseconds."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}),
}


def random_model(kind: str = "llama", attention: str = "sdpa", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of one of CONFIGS with weights large enough that its choices are not ties."""
    config, own = CONFIGS[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(**(SHAPE | own | settings)), attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return model.eval()


def prompt(rows: int = 2, tokens: int = 40, seed: int = 0) -> torch.Tensor:
    """Random token ids, without the special ones."""
    return torch.randint(2, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))
