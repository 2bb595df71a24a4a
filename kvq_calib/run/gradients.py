"""Measure the cost of errors of keys and values to the model: second moments of its gradients, layer by layer.

    g_t = ∂/∂x_t Σ_u (log p(y_u) - log p(y'_u)) / √2      x_t a token's keys before RoPE, or values
    M   = E[g gᵀ] by KV head      Fisher information: an error e of a token moves later predictions by ½ e M eᵀ nats

Keys are encoded before RoPE, after it, or by segment: g is turned as they are.

y_u and y'_u are drawn from the model's own p at u. Their difference has mean 0 and, over √2, the second moment that one
of them has about its mean: squares of single predictions add up, not the square of their sum, and the mean over all of
the vocabulary need not be computed. M is in nats in every layer, for keys as for values, so that costs are
comparable.

The first sequences of the fit part go up through the layers once, and their gradients down again; one layer is on the
device at a time, hidden states are files. The way down costs as much as two to three forward passes of these sequences.
The moments are kept beside the tokens: a run that was killed before that begins it anew.

Source: Amari, 1998 (Fisher information and divergence); Theis et al., 2018 (Fisher pruning: one draw for each token).
Differs: of channels of the cache, not of weights; a second draw in place of the mean of all; nothing between KV heads,
as between layers, is kept.
"""

import time
from pathlib import Path

import torch
from torch import Tensor

from kvq_calib.model.streamed import Head, Stream
from kvq_calib.run import checkpoint
from kvq_calib.run.plan import Plan
from kvq_calib.run.run import Run
from kvq_runtime.geometry import ROLES, Role
from kvq_runtime.ops import rope
from kvq_runtime.recipe import Recipe

TILE = 256  # tokens whose logits are computed at once
FILE = "gradients.safetensors"
LEAST = 1e-3  # of the mean token's energy, so that a gradient of zero has a logarithm


def chunks(plan: Plan) -> list[range]:
    """Return the sequences to take gradients of, chunk by chunk."""
    return plan.beginning().chunks


def collect(run: Run, stream: Stream, tokens_BT: Tensor, folder: Path, seconds: dict[str, float]) -> dict[str, Tensor]:
    """Return second moments of gradients by `moment_name`, float64 [H, D, D], and squared lengths by `energy_name`,
    float32 [sequences, T, H].

    folder    for temporary hidden states and gradients
    seconds   gets the time of both ways
    """
    kinds = sorted({(recipe.window.sinks, turn(recipe)) for recipe in run.plan.recipes})
    tables = stream.rope(run.plan.seq_len) if any(turned for _, turned in kinds) else None
    moments: dict[str, Tensor] = {}
    energies: dict[str, list[Tensor]] = {}
    plan, layers, parts = run.plan, run.plan.geometry.layers, chunks(run.plan)
    indices = range(len(parts))
    work = 2 * layers * len(indices)

    def hidden(layer: int, index: int) -> Path:
        """Return the file of the hidden states under a layer."""
        return folder / f"stream-{layer:04d}.{index:05d}.safetensors"

    def gradient(index: int) -> Path:
        return folder / f"gradient-{index:05d}.safetensors"

    begun = time.perf_counter()
    for index, rows in enumerate(parts):
        checkpoint.save({"hidden": stream.embed(tokens_BT[rows.start : rows.stop]).cpu()}, hidden(0, index))
    for layer in range(layers):
        module = stream.layer(layer)
        for index in indices:
            out_BTE = module.forward(checkpoint.load(hidden(layer, index))["hidden"]).h_BTE
            checkpoint.save({"hidden": out_BTE.cpu()}, hidden(layer + 1, index))
            run.report(-1, "gradients", layer * len(indices) + index + 1, work)
        del module
    seconds["forward"] = time.perf_counter() - begun
    head = stream.head()
    for index in indices:
        h_BTE = checkpoint.load(hidden(layers, index))["hidden"].to(stream.device)
        checkpoint.save({"gradient": _drawn(head, h_BTE, plan.seed, index).cpu()}, gradient(index))
    del head
    counted = sum(map(len, parts))
    for layer in reversed(range(layers)):
        module = stream.layer(layer)
        for index in indices:
            from_above = checkpoint.load(gradient(index))["gradient"]
            below, *pair = module.gradients(checkpoint.load(hidden(layer, index))["hidden"], from_above)
            for role, g_NTC in zip(ROLES, pair, strict=True):
                heads = plan.geometry.kv_heads
                energies.setdefault(energy_name(layer, role), []).append(_energy(g_NTC, heads))
                for left_out, turned in kinds if role == "key" else {(sinks, 0) for sinks, _ in kinds}:
                    part = _moment(_turned(g_NTC, turned, tables, heads)[:, left_out:], heads)
                    part /= counted * (g_NTC.shape[1] - left_out)
                    key = moment_name(layer, role, left_out, turned)
                    moments[key] = moments[key] + part if key in moments else part
            checkpoint.save({"gradient": below.cpu()}, gradient(index))
            hidden(layer + 1, index).unlink()
            run.report(-1, "gradients", work - layer * len(indices) - len(indices) + index + 1, work)
        del module
    for index in indices:
        gradient(index).unlink()
        hidden(0, index).unlink()
    seconds["gradients"] = time.perf_counter() - begun - seconds["forward"]
    return moments | {key: torch.cat(parts) for key, parts in energies.items()}


def turn(recipe: Recipe) -> int:
    """Return how gradients of its keys are turned: 0 not, -1 by their position, else by their place in a segment."""
    return {"pre": 0, "post": -1}.get(recipe.position, recipe.segment)


def _turned(g_NTC: Tensor, turned: int, tables: tuple[Tensor, Tensor] | None, heads: int) -> Tensor:
    """Turn gradients at keys before RoPE into those at keys as they are encoded."""
    if not turned or tables is None:
        return g_NTC
    norm = tables[0].float().square() + tables[1].float().square()
    angles = (tables[0] / norm, tables[1] / norm)  # of keys that RoPE scales
    if turned > 0:
        angles = rope.between(tables, rope.of_middles(tables, turned))
    return rope.rotate(g_NTC.float().unflatten(-1, (heads, -1)), *angles).flatten(-2)


def moment_name(layer: int, role: Role, sinks: int, turned: int = 0) -> str:
    """Return the name of the moment of a layer's keys, turned as `turn` says, or values."""
    return f"layers.{layer}.{role}.{sinks}" + (f".turned{turned}" if turned else "")


def energy_name(layer: int, role: Role) -> str:
    """Return the name of the squared lengths at a layer's keys, or values."""
    return f"layers.{layer}.{role}.energy"


def moment(run: Run, layer: int, role: Role, recipe: Recipe) -> Tensor:
    """Read M of a layer's keys, or values, without the recipe's sinks: float64 [H, D, D]."""
    turned = turn(recipe) if role == "key" else 0
    name = moment_name(layer, role, recipe.window.sinks, turned)
    return checkpoint.load(checkpoint.folder_of(run.folder, -1) / FILE)[name]


def log_importance(run: Run, layer: int, role: Role, sinks: int) -> Tensor:
    """Read log weights of tokens' errors at a layer's keys, or values: float32 [sequences, T].

    A weight is the squared length of a token's gradient over its head's mean, averaged over heads: noisy, of one draw.
    """
    energy_NTH = checkpoint.load(checkpoint.folder_of(run.folder, -1) / FILE)[energy_name(layer, role)]
    mean_H = energy_NTH[:, sinks:].mean((0, 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return ((energy_NTH / mean_H).mean(-1) + LEAST).log()


def _drawn(head: Head, h_BTE: Tensor, seed: int, index: int) -> Tensor:
    """Return the gradient of Σ (log p(y) - log p(y')) / √2 with respect to the hidden states under the head."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    tiles = [tile_TE for row_TE in h_BTE for tile_TE in row_TE.split(TILE)]
    uniform = [
        torch.rand(len(tile_TE), 2, dtype=torch.float32, generator=generator).to(h_BTE.device) for tile_TE in tiles
    ]
    return torch.cat(list(map(head.gradient, tiles, uniform))).view(h_BTE.shape)


def _energy(g_NTC: Tensor, heads: int) -> Tensor:
    """Return squared lengths of the gradients of every head, float32 [N, T, H]."""
    return g_NTC.float().unflatten(-1, (heads, -1)).square().sum(-1).cpu()


def _moment(g_NTC: Tensor, heads: int) -> Tensor:
    """Σ g gᵀ of every head, float64 [H, D, D]; products of a sequence are float32."""
    rows_NHTD = g_NTC.float().unflatten(-1, (heads, -1)).transpose(1, 2)
    return (rows_NHTD.mT @ rows_NHTD).double().sum(0).cpu()
