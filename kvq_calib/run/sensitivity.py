"""Measure in one layer what settings for its keys, and for its values, do to what attention adds to the model's stream.

    key error     mean of ‖W (A(q, K̂) - A(q, K)) V‖² / ‖h‖²       A  causal softmax attention, W its output projection
    value error   mean of ‖W A(q, K) (V̂ - V)‖² / ‖h‖²             h  the stream at this token, with attention's part

The means are over tokens. Keys are judged with exact values and values with exact keys, so that the two can be chosen
apart. Every token but the sinks is decoded: the worst case, of any length. Layers below are decoded by the recipe.

All that follows sees the stream through a norm, token by token, so errors relative to it compare between layers: on the
embedded model a (small) unit of noise costs 0.24 nats of divergence in the first layer and 0.46 to 0.57 in the others.
Relative to attention's own output, layers differ four times as much as that.

Settings share the recipe's own prediction and differ in what follows it. They are measured on held-out chunks (on all,
where none is held out), at most MEASURED of them; and on as much of a text of another kind, on which nothing is fitted,
where the plan has one: the error is then the mean of the two.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvq_calib.fit.scheme import SchemeFit, Source
from kvq_calib.model import attention
from kvq_calib.model.attention import AttentionInputs, apply_rope
from kvq_calib.run.passes import RecipeWork
from kvq_calib.run.plan import MEASURED, Plan
from kvq_runtime.fit.statistics import ResidualMoment, Residuals, Statistics
from kvq_runtime.recipe import ROLES, Role, Scheme

ROWS = 1024  # tokens that the scales of a setting are fitted on: a quarter of those of what is kept


def texts(plan: Plan) -> list[list[int]]:
    """The chunks that settings are measured on, of the corpus, then of the transfer text if there is one."""
    own = list(range(plan.fitted_chunks if plan.held_out else 0, plan.own_chunks))[:MEASURED]
    other = list(range(plan.own_chunks, len(plan.chunks)))
    return [own, other] if other else [own]


def chunks(plan: Plan) -> list[int]:
    """The chunks of all texts that settings are measured on."""
    return [index for text in texts(plan) for index in text]


@torch.no_grad()
def attention_errors(
    work: RecipeWork, options: Mapping[Role, Sequence[Scheme]], sources: Mapping[Role, Source]
) -> dict[str, list[float]]:
    """Errors of the recipe's own fitted keys, then of the options in their place; and the same of values.

    sources   of what the options are fitted to
    """
    run, stream, layer = work.run, work.stream, work.layer
    plan, module = run.plan, stream.layer(layer)
    weight_EC = stream.files.output_projection(layer).to(stream.device, torch.float32)
    tables = stream.rope(plan.seq_len)
    fits = {role: _fits(work, role, options[role], sources[role]) for role in ROLES}
    sums = {role: torch.zeros(len(fits[role]), dtype=torch.float64) for role in ROLES}
    count, done, read = sum(map(len, fits.values())) * len(chunks(plan)), 0, texts(plan)
    share = {i: 1 / len(read) / plan.seq_len / sum(len(plan.chunks[j]) for j in text) for text in read for i in text}
    for index in chunks(plan):
        hidden = work.hidden(index)
        captured = module.forward(hidden, queries=True)
        chunk = attention.inputs(captured, tables, plan.geometry)
        exact = _attended(chunk, chunk.k, chunk.v, plan.geometry.head_size)
        energy_NT = (hidden.to(stream.device, torch.float32) + exact @ weight_EC.mT).square().sum(-1).clamp_min(1e-30)
        for role in ROLES:
            data, context = work.data(index, role, clean=False)
            for place, fit in enumerate(fits[role]):
                found = fit.codec.restore(fit.codec.encode_decode(data.x, context)[1].float(), context)
                out = _attended(chunk, *_read(fit, chunk, found, work.recipe.position), plan.geometry.head_size)
                error_NT = ((out - exact) @ weight_EC.mT).square().sum(-1) / energy_NT
                sums[role][place] += share[index] * error_NT.sum(dtype=torch.float64).cpu()
                done += 1
                run.report(layer, f"{work.recipe.name} settings", done, count, energy_NT.numel())
    return {role: sums[role].tolist() for role in ROLES}


def _fits(work: RecipeWork, role: Role, options: Sequence[Scheme], source: Source) -> list[SchemeFit]:
    """The recipe's own fit, and one of each option; what several ask for is collected once."""
    own = work.fits[role]
    moment_CC, rows_NC = own.collect(source, (ResidualMoment(), Residuals(ROWS))).values()
    found = {ResidualMoment(): moment_CC, Residuals(): rows_NC}
    shared = Statistics(own.statistics.mean_C, found, own.statistics.seed)
    return [own, *(own.with_rounding(scheme, shared, partial(own.collect, source)) for scheme in options)]


def _read(fit: SchemeFit, chunk: AttentionInputs, found: Tensor, position: str) -> tuple[Tensor, Tensor]:
    """Keys and values that attention reads, one of them decoded: `found` in blocks, the sinks and the rest exact."""
    role, sinks, turn = fit.codec.role, fit.window.sinks, position == "pre"
    exact = chunk.v if role == "value" else chunk.k_pre if turn else chunk.k
    rows = found.reshape(len(exact), -1, exact.shape[-1])
    x = torch.cat([exact[:, :sinks], rows[:, sinks:], exact[:, rows.shape[1] :]], 1)
    if role == "value":
        return chunk.k, x
    return (apply_rope(x, chunk.rope, fit.codec.geometry.kv_heads) if turn else x), chunk.v


def _attended(chunk: AttentionInputs, k_NTC: Tensor, v_NTC: Tensor, head_size: int) -> Tensor:
    pair, every = (k_NTC, v_NTC), attention.tiles(k_NTC.shape[1])
    return attention.attend(chunk, pair, pair, every, head_size)
