"""Fit a two-layer predictor by Adam on a sample of (inputs z, centred targets y).

A reference only: it predicts hardly better than a linear map and costs several times as much. The targets are brought
to unit size for the fit, the rates follow the size of the inputs, and the start and the batches come from the seed, so
that the same sample gives the same tensors on one machine.

Source: Shutova et al., 2025 (AQUA-KV), table 9.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvq_runtime.stages.predict import MLP


def fit_mlp(
    z_NI: Tensor, y_NO: Tensor, seed: int, norm: Literal["layer", "none"], steps: int = 1000, batch: int = 1024
) -> dict[str, Tensor]:
    """The tensors of an MLP, as its `specs` names them but for "mean": y is centred already."""
    predictor = MLP(norm=norm)
    random = torch.Generator().manual_seed(seed)
    z, y = z_NI.float(), y_NO.float()
    inputs, unit = z.shape[1], y.square().mean().sqrt().clamp_min(1e-12)
    reach = 1.0 if predictor.norm == "layer" else float(z.square().mean().sqrt().clamp_min(1e-12))
    shapes = {"hidden": (inputs, 2 * inputs), "out": (2 * inputs, y.shape[1])}
    found = {name: torch.randn(shape, generator=random) / math.sqrt(shape[0]) for name, shape in shapes.items()}
    found = {"hidden": found["hidden"] / reach, "hidden_bias": torch.zeros(2 * inputs), "out": found["out"]}
    found = {name: tensor.to(z.device) for name, tensor in found.items()} | {"bias": y.new_zeros(y.shape[1])}
    rates = [3e-3 / reach if name == "hidden" else 3e-3 for name in found]
    weights = [tensor.requires_grad_() for tensor in found.values()]
    adam = torch.optim.Adam([{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)])
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        rows = torch.randint(len(z), (min(batch, len(z)),), generator=random).to(z.device)
        loss = functional.mse_loss(predictor.apply(z[rows], found), y[rows] / unit)
        adam.zero_grad()
        loss.backward()
        adam.step()
        decay.step()
    return _stored(predictor, {name: tensor.detach() for name, tensor in found.items()}, z, y, unit)


def _stored(predictor: MLP, found: dict[str, Tensor], z: Tensor, y: Tensor, unit: Tensor) -> dict[str, Tensor]:
    """In the stored dtypes and the targets' unit, with a bias that centres the error on the sample."""
    stored = {
        "hidden": found["hidden"].to(torch.bfloat16),
        "hidden_bias": found["hidden_bias"],
        "out": (found["out"] * unit).to(torch.bfloat16),
        "bias": torch.zeros_like(found["bias"]),
    }
    return stored | {"bias": (y - predictor.apply(z, stored)).double().mean(0).float()}
