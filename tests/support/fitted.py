"""Fitted tensors without a calibration: random, but of the size that a fit would give, for any recipe and geometry.

A quantizer that is fitted to tokens alone is really fitted, to random ones, so that a new one has nothing to add here.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec import codec
from kvq_runtime.fit import fitting
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.stage import Quantizer

ROWS = 256  # tokens that a quantizer is fitted to
KEPT = 256  # of what was made last
PACKAGES = ("kvq_runtime.fit", "kvq_calib.fit")  # the shorter fit first
_made: dict[tuple[str, Geometry, int], dict[str, Tensor]] = {}


def tensors(recipe: Recipe, geometry: Geometry, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `codec.all_specs`: means around 1/2, predictions that explain a part of their target, and an
    orthogonal basis with ranges that suit the bits."""
    known = str(recipe.to_json()), geometry, seed
    if known not in _made:
        _made[known] = _tensors(recipe, geometry, seed)
        while len(_made) > KEPT:
            del _made[next(iter(_made))]
    return {name: tensor.clone() for name, tensor in _made[known].items()}


def _tensors(recipe: Recipe, geometry: Geometry, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    specs = codec.all_specs(recipe, geometry)
    found = {name: _one(name.rsplit(".", 1)[1], *spec, generator) for name, spec in specs.items()}
    for name in found:
        _, layer, role, stage, field = name.split(".")
        quantize = recipe.at(int(layer))[role == "value"].quantize
        if stage == "quantize" and field in ("low", "high"):
            found[name] *= _reach(quantize, geometry.width)
        if field == "dual":  # an orthogonal basis is its own
            found[name] = found[name.removesuffix("dual") + "basis"].clone()
    for layer in range(geometry.layers if specs else 0):
        for number, role in enumerate(ROLES):
            scheme = recipe.scheme(layer, role)
            if _is_fitted_here(scheme.quantize):
                fields = _quantizer(replace(scheme, predict=None), geometry, seed + 2 * layer + number)
                found |= {f"layers.{layer}.{role}.{name}": tensor.clone() for name, tensor in fields.items()}
    return found


def _is_fitted_here(quantize: Quantizer) -> bool:
    """Whether it is fitted to tokens alone; the bits of latent channels need a basis that fits them."""
    if not quantize.fitted or quantize.takes_latents or quantize.kind == "nuq":  # whose clusters take seconds
        return False
    return fitting.fit_module(quantize, PACKAGES).requests(quantize) == (Residuals(),)


@cache
def _quantizer(scheme: Scheme, geometry: Geometry, seed: int) -> dict[str, Tensor]:
    """The tensors of a scheme's quantizer, fitted to tokens whose channels are of middling mean and size."""
    generator = torch.Generator().manual_seed(seed)
    rows_NC = 0.5 + torch.randn(ROWS, geometry.width, generator=generator)
    fit = fitting.Fitting(Recipe("random", scheme, scheme), 0, "key", geometry, Statistics(rows_NC.mean(0)))
    fit.packages = PACKAGES
    fit.solve(lambda asked: {Residuals(): rows_NC}, slots=("quantize",))
    return fit.tensors


def _reach(quantize: Any, width: int) -> Tensor:
    """How many deviations a range should reach at these bits, by channel: fewer bits do better with less."""
    return torch.cat([torch.full((count,), 0.45 + 0.55 * bits) for count, bits in quantize.runs(width)])


def _one(field: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    x = torch.randn(shape, generator=generator)
    if field in ("basis", "rotation") and len(shape) == 3:  # of each head
        return torch.linalg.qr(x).Q.to(dtype).contiguous()
    if field == "basis":
        square = torch.randn(shape[0], shape[0], generator=generator)
        return torch.linalg.qr(square).Q[:, : shape[1]].to(dtype).contiguous()
    if field in ("deviation", "high") or (field, dtype) == ("low", torch.float32):  # of latent channels
        return {"deviation": 1.2, "high": 1.2, "low": -1.2}[field] * (1 + 0.05 * x)
    if field.startswith("update_"):  # of feedback: smaller than the error that it follows
        return (0.5 * x / shape[-1] ** 0.5).to(dtype)
    if field == "points":
        return torch.linspace(-0.9, 0.9, shape[0])
    if field == "half":
        return 2.5 * (1 + 0.05 * x)
    if field == "cell":
        return 0.5 * (1 + 0.05 * x)
    if field == "gain_ends":  # of tokens half and twice as large as others
        return torch.tensor([-0.7, 0.7]).expand(shape).clone()
    if field == "importance":
        return x / (2 * shape[-1] ** 0.5)
    if field.endswith(("step", "low")):  # of 4-bit weights: 64 inputs to a group
        step = 0.1 / (64 * shape[-1]) ** 0.5
        x = step * (1 + 0.1 * x) * (1 if field == "step" else -7.5)
    elif field == "bias":
        x = 0.05 * x
    elif len(shape) > 1:
        x = 0.5 * x / shape[0] ** 0.5
    else:
        x = 0.5 * x
    return x.to(dtype)
