"""Small random models on disk, of each supported architecture: fixed weights, a few thousand parameters."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def save(folder: Path, architecture: str = "qwen2", layers: int = 3, seed: int = 0) -> Path:
    """Write a model with 2 KV heads of 16, and a byte-level tokenizer of 256 tokens."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    if architecture == "mistral":
        settings["sliding_window"] = None
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_(0, 2)  # Qwen's keys: far from zero in the mean
            elif "embed" in name or "proj" in name:
                parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    alphabet = {chr(0x100 + byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.WordLevel(alphabet, unk_token=chr(0x100)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def with_text(folder: Path) -> Path:
    """`tiny-model` in a folder: a llama of two layers, and a corpus for it."""
    model = folder / "tiny-model"
    model.mkdir()
    save(model, "llama", layers=2)
    text(model)
    return model


def text(folder: Path, characters: int = 20000, seed: int = 0) -> Path:
    """Write a corpus for that tokenizer: a Markov chain, so that there is something to predict."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 8, (characters,), generator=generator).cumsum(0) % 256
    path = folder / "corpus.txt"
    path.write_text("".join(chr(0x100 + int(step)) for step in steps), encoding="utf-8")
    return path
