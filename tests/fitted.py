"""Fitted tensors that nobody fitted: random, but of the size that a fit would give, for any recipe and geometry."""

import torch
from torch import Tensor

from kvq_runtime import codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe


def tensors(recipe: Recipe, geometry: Geometry, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `codec.all_specs`: means around 1/2, predictions that explain a part of their target."""
    generator = torch.Generator().manual_seed(seed)
    specs = codec.all_specs(recipe, geometry)
    return {name: _one(name.rsplit(".", 1)[1], *spec, generator) for name, spec in specs.items()}


def _one(field: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    x = torch.randn(shape, generator=generator)
    if field in ("step", "low"):  # of 4-bit weights: 64 inputs to a group
        step = 0.1 / (64 * shape[-1]) ** 0.5
        x = step * (1 + 0.1 * x) * (1 if field == "step" else -7.5)
    elif field == "bias":
        x = 0.05 * x
    elif len(shape) > 1:
        x = 0.5 * x / shape[0] ** 0.5
    else:
        x = 0.5 * x
    return x.to(dtype)
