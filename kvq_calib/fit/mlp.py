"""Fit a two-layer predictor by Adam on (inputs z, centred targets y): on a sample of tokens, or on all of them.

    sample   steps on rows drawn from the sample, which is in memory
    all      the chunks of the calibration one after another, each in an order of its own, as often as it takes for
             1000 steps of 1024 tokens; one chunk at a time is in memory

A reference only: it predicts hardly better than a linear map and costs several times as much. The targets are brought
to unit size for the fit, the rates follow the size of the inputs and fall as a cosine, and the start and the batches
come from the seed, so that the same tokens give the same tensors on one machine, whoever decoded the chunks.

Source: Shutova et al., 2025 (AQUA-KV), table 9.
Differs: the paper does not say how its MLP is trained.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kvq_calib.fit.statistics import Centred
from kvq_runtime.stages.predict import MLP

STEPS, BATCH = 1000, 1024
PASSES = 16  # over the chunks at the most: where there are few tokens, a chunk is gone through several times in each
RATE = 3e-3
Tensors = dict[str, Tensor]
Chunks = Callable[[], Iterable[Tensor]]


def fit_mlp(
    predictor: MLP, z_NI: Tensor, y_NO: Tensor, seed: int, steps: int = STEPS, batch: int = BATCH
) -> dict[str, Tensor]:
    """The tensors of an MLP, as its `specs` names them but for "mean", from a sample: y is centred already."""
    random = torch.Generator().manual_seed(seed)
    z, y = z_NI.float(), y_NO.float()
    unit, reach = (float(x.square().mean().sqrt().clamp_min(1e-12)) for x in (y, z))
    weights = _start(predictor, z.shape[1], y.shape[1], reach, random, z.device)
    adam = _adam(predictor, weights, reach)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        rows = torch.randint(len(z), (min(batch, len(z)),), generator=random).to(z.device)
        _step(predictor, weights, adam, z[rows], y[rows] / unit)
        decay.step()
    return _stored(predictor, weights, unit, lambda: [torch.cat([z, y], 1)])


def fit_mlp_to_all(
    predictor: MLP, joint: Centred, chunks: Chunks, seed: int, steps: int = STEPS, batch: int = BATCH
) -> dict[str, Tensor]:
    """The same from every token.

    joint    moments of all inputs and targets: how many there are, and how large
    chunks   () → the tokens of each chunk, inputs and centred targets side by side, [N, I + O]; called for every pass
    steps    at least, and as many more as one pass over more tokens takes
    """
    random = torch.Generator().manual_seed(seed)
    inputs, outputs = len(joint.mean_x_I), len(joint.mean_y_O)
    squares = (joint.yy_O + joint.mean_y_O.square(), joint.xx_II.diagonal() + joint.mean_x_I.square())
    unit, reach = (float(x.mean().sqrt().clamp_min(1e-12)) for x in squares)
    weights = _start(predictor, inputs, outputs, reach, random, joint.mean_x_I.device)
    adam = _adam(predictor, weights, reach)
    rates = [group["lr"] for group in adam.param_groups]
    epochs = max(1, math.ceil(steps * batch / joint.count))
    passes = min(epochs, PASSES)
    every, seen = epochs // passes * passes * joint.count, 0
    for rows_NK in _batches(chunks, passes, epochs // passes, batch, random):
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * seen / every)) / 2
        z, y = rows_NK.to(weights["out"].device).tensor_split([inputs], 1)
        _step(predictor, weights, adam, z, y / unit)
        seen += len(z)
    return _stored(predictor, weights, unit, chunks)


def _batches(chunks: Chunks, passes: int, again: int, batch: int, random: torch.Generator) -> Iterator[Tensor]:
    """Batches of about `batch` tokens: each chunk in an order of its own, `again` times in each pass."""
    for _ in range(passes):
        for rows_NK in chunks():
            parts = max(1, round(len(rows_NK) / batch))
            for _ in range(again):
                order = torch.randperm(len(rows_NK), generator=random).to(rows_NK.device)
                yield from (rows_NK[part] for part in order.tensor_split(parts) if len(part))


def _start(
    predictor: MLP, inputs: int, outputs: int, reach: float, random: torch.Generator, device: torch.device
) -> Tensors:
    """Random weights, which are to be changed; `reach` is the size of an input that is not normalized."""
    wide = predictor.hidden_size(inputs, outputs)
    shapes = {"hidden": (inputs, wide), "out": (wide, outputs)}
    found = {name: torch.randn(shape, generator=random) / math.sqrt(shape[0]) for name, shape in shapes.items()}
    found["hidden"] /= 1.0 if predictor.norm == "layer" else reach
    found = {"hidden": found["hidden"], "hidden_bias": torch.zeros(wide), "out": found["out"]}
    found = {name: tensor.to(device) for name, tensor in found.items()} | {"bias": torch.zeros(outputs, device=device)}
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def _adam(predictor: MLP, weights: Tensors, reach: float) -> torch.optim.Adam:
    rates = {name: RATE for name in weights}
    rates["hidden"] /= 1.0 if predictor.norm == "layer" else reach
    return torch.optim.Adam([{"params": [tensor], "lr": rates[name]} for name, tensor in weights.items()])


def _step(predictor: MLP, weights: Tensors, adam: torch.optim.Adam, z: Tensor, y: Tensor) -> None:
    loss = functional.mse_loss(predictor.apply(z, weights), y)
    adam.zero_grad()
    loss.backward()
    adam.step()


def _stored(predictor: MLP, weights: Tensors, unit: float, chunks: Chunks) -> Tensors:
    """In the stored dtypes and the targets' unit, with a bias that centres the error on the tokens of these chunks."""
    found = {name: tensor.detach() for name, tensor in weights.items()}
    stored = {
        "hidden": found["hidden"].to(torch.bfloat16),
        "hidden_bias": found["hidden_bias"],
        "out": (found["out"] * unit).to(torch.bfloat16),
        "bias": torch.zeros_like(found["bias"]),
    }
    total, count = torch.zeros_like(found["bias"], dtype=torch.float64), 0
    for rows_NK in chunks():
        z, y = rows_NK.to(total.device).tensor_split([len(found["hidden"])], 1)
        total += (y - predictor.apply(z, stored)).double().sum(0)
        count += len(z)
    return stored | {"bias": (total / count).float()}
