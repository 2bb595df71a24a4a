"""Write a transformers model as a GGUF file, as llama.cpp's conversion does: names, order of rows, metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.": "attn_", "mlp.": "ffn_",
    "_proj.": ".",
}  # fmt: skip
GEMMA = {"pre_feedforward_layernorm": "ffn_norm", "post_attention_layernorm": "post_attention_norm",
         "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip


def write(model: PreTrainedModel, path: Path, kind: Type = Type.F32, **extra: Any) -> Path:
    """The file of a model whose matrices have a type of ggml.

    extra   values beside those of the model, dots as __; None leaves one out, an array of float32 is a tensor
    """
    config = model.config
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    names = NAMES | (GEMMA if architecture == "gemma3" else {})
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    given: dict[str, Any] = {
        "general.name": f"a tiny {config.model_type}",
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.rope.dimension_count": config.head_dim,
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.vocab_size": config.vocab_size,
        f"{architecture}.attention.sliding_window": config.sliding_window if architecture == "gemma3" else None,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["ab", *bytes_to_unicode().values()][: config.vocab_size],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    for name, value in (given | {name.replace("__", "."): value for name, value in extra.items()}).items():
        _add(writer, name, value)
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        used = kind if weight.dim() > 1 else Type.F32
        writer.add_tensor(name, quants.quantize(weight.contiguous().numpy(), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        writer.add_tensor(name, value.numpy().astype(np.float32))
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif value is not None:
        writer.add_string(name, value)
