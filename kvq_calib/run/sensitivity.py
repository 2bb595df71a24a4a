"""Measure in one layer what settings for its keys, and for its values, do to what attention adds to the model's stream.

    key error     mean of ‖W (A(q, K̂) - A(q, K)) V‖² / ‖h‖²       A  causal softmax attention, W its output projection
    value error   mean of ‖W A(q, K) (V̂ - V)‖² / ‖h‖²             h  the stream at this token, with attention's part

The means are over tokens. Keys are judged with exact values and values with exact keys, so that the two can be chosen
apart. Every token but the sinks is decoded: the worst case, of any length. Layers below are decoded as the recipe says.

All that follows sees the stream through a norm, token by token, so errors relative to it compare between layers: on the
embedded model a (small) unit of noise costs 0.24 nats of divergence in the first layer and 0.46 to 0.57 in the others.
Relative to attention's own output, layers differ four times as much as that.

Settings share the recipe's own prediction and differ in what follows it. They are measured on held-out chunks (on all,
where none is held out), at most MEASURED of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_calib.evaluate import attention
from kvq_calib.evaluate.errors import Chunk, turn, turned
from kvq_calib.fit.layer import SideFit
from kvq_calib.plan import Plan
from kvq_runtime.recipe import HALVES, Half, Side

if TYPE_CHECKING:
    from kvq_calib.chunks import RecipeWork

MEASURED = 4
ROWS = 1024  # tokens that the scales of a setting are fitted on: a quarter of those of what is kept


def chunks(plan: Plan) -> list[int]:
    """The chunks that settings are measured on."""
    held_out = list(range(plan.fitted_chunks, len(plan.chunks)))
    return (held_out or list(range(len(plan.chunks))))[:MEASURED]


@torch.no_grad()
def attention_errors(work: RecipeWork, options: Sequence[Side]) -> dict[str, list[float]]:
    """Errors of the recipe's own fitted keys, then of the options in their place; and the same of values."""
    run, stream, layer = work.run, work.stream, work.layer
    plan, module = run.plan, stream.layer(layer)
    weight_EC = stream.files.tensor(f"model.layers.{layer}.self_attn.o_proj.weight").to(stream.device, torch.float32)
    tables = stream.rope(plan.seq_len)
    fits = {half: _fits(work, half, options) for half in HALVES}
    sums = {half: torch.zeros(len(fits[half]), dtype=torch.float64) for half in HALVES}
    count = sum(map(len, fits.values())) * len(chunks(plan))
    done, tokens = 0, plan.seq_len * sum(len(plan.chunks[index]) for index in chunks(plan))
    for index in chunks(plan):
        hidden = work.hidden(index)
        captured = module.forward(hidden, queries=True)
        chunk = turned(captured, tables, plan.geometry)
        exact = _attended(chunk, chunk.k, chunk.v)
        energy_NT = (hidden.to(stream.device, torch.float32) + exact @ weight_EC.mT).square().sum(-1).clamp_min(1e-30)
        for half in HALVES:
            data, context = work.data(index, half, clean=False)
            for place, fit in enumerate(fits[half]):
                found = fit.codec.restore(fit.decode(data, context).float(), context)
                out = _attended(chunk, *_read(fit, chunk, found))
                error_NT = ((out - exact) @ weight_EC.mT).square().sum(-1) / energy_NT
                sums[half][place] += error_NT.sum(dtype=torch.float64).cpu()
                done += 1
                run.say(layer, f"{work.recipe.name} settings", done, count, energy_NT.numel())
    return {half: (sums[half] / tokens).tolist() for half in HALVES}


def _fits(work: RecipeWork, half: Half, options: Sequence[Side]) -> list[SideFit]:
    """The recipe's own fit, and one of each option."""
    own, plan = copy(work.fits[half]), work.run.plan
    own.rows = ROWS
    moments, sample = own.no_residuals(plan.seed)
    for index in range(plan.fitted_chunks):
        part, rows = own.residuals(*work.data(index, half, clean=False), plan.seed)
        moments.merge(index, part)
        sample.merge(index, rows)
    return [own, *(own.rounding(side, (moments, sample), plan.seed) for side in options)]


def _read(fit: SideFit, chunk: Chunk, found: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that attention reads, one of them decoded: `found` in blocks, the sinks and the rest exact."""
    half, sinks = fit.codec.half, fit.side.sinks
    exact = chunk.bare if half == "key" else chunk.v
    rows = found.reshape(len(exact), -1, exact.shape[-1])
    x = torch.cat([exact[:, :sinks], rows[:, sinks:], exact[:, rows.shape[1] :]], 1)
    return (turn(x, chunk.rope, fit.codec.geometry.kv_heads), chunk.v) if half == "key" else (chunk.k, x)


def _attended(chunk: Chunk, k_NTC: Tensor, v_NTC: Tensor) -> Tensor:
    head_size = 2 * chunk.rope[0].shape[-1]
    pair, every = (k_NTC, v_NTC), attention.tiles(k_NTC.shape[1])
    return attention.attend(chunk.q, pair, pair, every, head_size)
