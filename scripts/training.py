"""What the runs that train embedded models share: the state to go on from, and the folder of the model."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LARGEST = 9_000_000  # bytes of the weights: they live in the repository


def keep(model, optimizer, state: Path, identity: str, step: int, seconds: float) -> None:
    """Save the state under a temporary name, then move it into place."""
    state.parent.mkdir(parents=True, exist_ok=True)
    partial = state.with_suffix(".partial")
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(kept | {"identity": identity, "step": step, "seconds": seconds}, partial)
    partial.replace(state)


def restore(model, optimizer, state: Path, identity: str) -> tuple[int, float]:
    """Go on from a saved state: (steps done, seconds spent); (0, 0) without one."""
    if not state.exists():
        return 0, 0.0
    kept = torch.load(state, weights_only=True)
    if kept["identity"] != identity:
        raise ValueError(
            f"{state} is the state of a run with other text or settings; remove it, or give another --state"
        )
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return kept["step"], kept["seconds"]


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
