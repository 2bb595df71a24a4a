"""Fitted tensors that nobody fitted: random, but of the size that a fit would give, for any recipe and geometry."""

import torch
from torch import Tensor

from kvq_runtime import codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import polar
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.polar import PolarFitted


def tensors(recipe: Recipe, geometry: Geometry, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `codec.all_specs`: means around 1/2, predictions that explain a part of their target, an
    orthogonal basis with ranges that suit the bits, and an escape that many tokens want."""
    generator = torch.Generator().manual_seed(seed)
    specs = codec.all_specs(recipe, geometry)
    found = {name: _one(name.rsplit(".", 1)[1], *spec, generator) for name, spec in specs.items()}
    for name in found:
        _, layer, half, stage, field = name.split(".")
        quantize = recipe.at(int(layer))[half == "value"].quantize
        if stage == "quantize" and field in ("low", "high"):
            found[name] *= _reach(quantize, geometry.width)
        if stage == "quantize" and isinstance(quantize, PolarFitted):  # the exact ones will do
            levels = list(enumerate(quantize.sizes(geometry.width, geometry)[1], start=1))
            boundaries = torch.cat([polar.codebook(*level)[0] for level in levels])
            points = torch.cat([polar.points(*level, quantize.points) for level in levels])
            found[name] = {"boundaries": boundaries, "points": points}[field].float()
        if field == "dual":  # an orthogonal basis is its own
            found[name] = found[name.removesuffix("dual") + "basis"].clone()
    return found


def _reach(quantize: Mixed, width: int) -> Tensor:
    """How many deviations a range should reach at these bits, by channel: fewer bits do better with less."""
    return torch.cat([torch.full((count,), 0.45 + 0.55 * bits) for count, bits in quantize.runs(width)])


def _one(field: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if field == "points":  # as of a Gaussian whose ends are its deviations times two
        return torch.special.ndtri((torch.arange(shape[0]) + 0.5) / shape[0]) / 2
    x = torch.randn(shape, generator=generator)
    if field == "basis":
        square = torch.randn(shape[0], shape[0], generator=generator)
        return torch.linalg.qr(square).Q[:, : shape[1]].to(dtype).contiguous()
    if field in ("middle", "half"):  # of channels: 2.6 deviations about a mean of 1/2
        return 0.5 + 0.1 * x if field == "middle" else 2.6 * (1 + 0.05 * x.abs())
    if field in ("deviation", "high") or (field, dtype) == ("low", torch.float32):  # of latent channels
        return {"deviation": 1.2, "high": 1.2, "low": -1.2}[field] * (1 + 0.05 * x)
    if field.startswith("update_"):  # of feedback: smaller than the error that it follows
        return (0.5 * x / shape[-1] ** 0.5).to(dtype)
    if field == "bound":
        return torch.full(shape, 20.0)
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
