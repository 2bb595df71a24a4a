"""What the runs that train embedded models share: the folder of the model, and options."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LARGEST = 9_000_000  # bytes of the weights: they live in the repository


def save(model, tokenizer, out: Path, padding: int | None) -> int:
    """Write the folder in bfloat16, weights as safetensors; the size of the weights in bytes."""
    model.generation_config.pad_token_id = padding
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > LARGEST:
        raise ValueError(f"the weights have {size} bytes; the repository takes {LARGEST}")
    return size


def add_settings(parser: argparse.ArgumentParser, defaults: Any, kinds: Mapping[str, type]) -> None:
    """Add an option for each of these settings."""
    for name, kind in kinds.items():
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"({default})")
