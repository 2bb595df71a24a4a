"""Choose the bits of each layer's keys and values, so that a recipe keeps a budget of bits per element.

`auto` is `aqua-fisher` with paths that weigh tokens, and the budget as its target: `share.py` gives bits to all latent
channels of all layers by one measure, in two rounds and without trying any setting. For an engine (`--for vllm`),
whose layers see their own pages alone, the recipe is one after RoPE: the mean removed, and a width of what rounds each
head of a token by itself. These settings are measured one by one:

    round 0   fit the recipe with one setting everywhere, measure every setting in its place in every layer, by what it
              does to what attention adds to the model's stream
    choose    the settings with the least sum of errors within the budget (the multiple-choice knapsack, exact)
    round 1   fit the recipe with what was chosen; measure again, now above layers as they will be
    round 2   where the sum of round 1 is more than TOLERANCE off what its choice promised: choose and fit once more

Of all rounds, the one with the least measured sum is the artifact: its recipe names a Scheme per layer, and a runtime
sees a recipe like any other. A round is a run of its own, in a folder of its own, so it resumes like any other.

    key error     mean of ‖W (A(q, K̂) - A(q, K)) V‖² / ‖h‖²       A  causal softmax attention, W its output projection
    value error   mean of ‖W A(q, K) (V̂ - V)‖² / ‖h‖²             h  the stream at this token, with attention's part

The means are over tokens. Keys are judged with exact values and values with exact keys, so that the two can be chosen
apart. Every token but the sinks is decoded: the worst case, of any length. Layers below are decoded by the recipe.

All that follows sees the stream through a norm, token by token, so errors relative to it compare between layers: on the
embedded model a (small) unit of noise costs 0.24 nats of divergence in the first layer and 0.46 to 0.57 in the others.
Relative to attention's own output, layers differ four times as much as that.

Settings are measured on held-out chunks (on all, where none is held out), at most MEASURED of them; and on as much of a
text of another kind, on which nothing is fitted, where the plan has one: the error is then the mean of the two.

Source: Shoham and Gersho, 1988 (allocation among arbitrary quantizers by measured error, by a Lagrangian, which reaches
only the budgets on the convex hull); Kellerer, Pferschy and Pisinger, 2004, chapter 11; Li et al., 2025 (KVTuner:
precision pairs of keys and values by layer, searched offline).
Differs: KVTuner prunes and searches with NSGA-II on the model's accuracy; here errors are measured once a setting, are
taken to add up, and the choice is exact.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.scheme import SchemeFit, Source
from kvq_calib.model import attention
from kvq_calib.model.attention import AttentionInputs
from kvq_calib.run import checkpoint, share
from kvq_calib.run.passes import RecipeWork
from kvq_calib.run.plan import MEASURED, Plan
from kvq_calib.run.run import Run
from kvq_runtime.fit.statistics import ResidualMoment, Residuals, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import ROLES, Recipe, Role, Scheme, Window, with_each
from kvq_runtime.recipes import aqua_fisher, higgs, turboquant
from kvq_runtime.recipes.aqua_fisher import GAIN
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.vllm import plugin

AUTOMATIC = "auto"
GRIDS = ("1bit", "2bit", "3bit", "4bit")
MEAN = Mean()
SERVED = (4, 8)  # bits of plain rounding among the settings of an engine: where codebooks end
ROUNDS = 3
DRAFT = "draft"  # its folder, in the run's own
TOLERANCE = 0.05
ROWS = 1024  # tokens that the scales of a setting are fitted on: a quarter of those of what is kept


@lru_cache(maxsize=8)
def served_options(geometry: Geometry) -> list[Scheme]:
    """Return the settings for the keys, or values, of a layer that vLLM serves, cheapest first."""
    found = [higgs.scheme(bits, "head", MEAN) for bits in GRIDS]
    found += [turboquant.scheme(bits, predict=MEAN) for bits in turboquant.BITS]
    found += [Scheme(Rtn(bits, "head"), rotate=Hadamard("head"), predict=MEAN) for bits in SERVED]
    served = []
    for scheme in found:
        with suppress(ValueError):
            plugin.check_recipe(Recipe("option", scheme, scheme), geometry)
            served.append(scheme)
    return sorted(served, key=lambda scheme: _bits(scheme, geometry))


def _bits(scheme: Scheme, geometry: Geometry) -> float:
    return scheme.bits(Window().block, geometry)


def shared(bits: float, geometry: Geometry) -> Recipe:
    """`aqua-fisher` with paths that weigh tokens and at most `bits` bits per element, averaged over all layers.

    ValueError: no such budget."""
    low, high = (GAIN + 1) / geometry.width, float(Mixed().bits[0])
    if not low <= bits <= high:
        raise ValueError(f"--bits {bits:g}; this model can have {math.ceil(1e3 * low) / 1e3:g} to {high:g}")
    plain = aqua_fisher.aqua_fisher("auto", math.floor(bits * geometry.width + 1e-6) / geometry.width)
    found = with_each(plain, lambda scheme: replace(scheme, quantize=replace(scheme.quantize, weighed=True)))
    return replace(found, name=f"auto-{bits:g}bit", summary=f"bits by layer, by the model's gradients, {bits:g} in all")


def served(bits: float, geometry: Geometry) -> Recipe:
    """Return the recipe of round 0 for vLLM: in every layer the dearest setting within the budget.

    ValueError: no such budget."""
    options = served_options(geometry)
    low, high = (_bits(options[end], geometry) for end in (0, -1))
    if not low <= bits <= high:
        raise ValueError(
            f"--bits {bits:g}; this model, for vllm, can have {math.ceil(1e3 * low) / 1e3:g} to {high:.3f}"
        )
    dearest = [scheme for scheme in options if _bits(scheme, geometry) <= bits][-1]
    summary = f"bits by layer, chosen by attention's error, {bits:g} in all, for vllm"
    return Recipe(f"auto-{bits:g}bit-vllm", dearest, dearest, summary=summary)


def texts(plan: Plan) -> list[list[int]]:
    """The chunks that settings are measured on, of the corpus, then of the transfer text if there is one."""
    own = list(range(plan.fitted_chunks if plan.held_out else 0, plan.own_chunks))[:MEASURED]
    other = list(range(plan.own_chunks, len(plan.chunks)))
    return [own, other] if other else [own]


def measured_chunks(plan: Plan) -> list[int]:
    """The chunks of all texts that settings are measured on."""
    return [index for text in texts(plan) for index in text]


@torch.no_grad()
def attention_errors(
    work: RecipeWork, options: Sequence[Scheme], sources: Mapping[Role, Source]
) -> dict[str, list[float]]:
    """Errors of the recipe's own fitted keys, then of the options in their place; and the same of values.

    sources   of what the options are fitted to
    """
    run, stream, layer = work.run, work.stream, work.layer
    plan, module = run.plan, stream.layer(layer)
    weight_EC = stream.files.output_projection(layer).to(stream.device, torch.float32)
    tables = stream.rope(plan.seq_len)
    fits = {role: _fits(work, role, options, sources[role]) for role in ROLES}
    sums = {role: torch.zeros(len(fits[role]), dtype=torch.float64) for role in ROLES}
    count, done, read = sum(map(len, fits.values())) * len(measured_chunks(plan)), 0, texts(plan)
    share = {i: 1 / len(read) / plan.seq_len / sum(len(plan.chunks[j]) for j in text) for text in read for i in text}
    for index in measured_chunks(plan):
        hidden = work.hidden(index)
        captured = module.forward(hidden, queries=True)
        chunk = attention.inputs(captured, tables, plan.geometry)
        exact = _attended(chunk, chunk.k, chunk.v, plan.geometry.head_size)
        hidden = hidden[..., : stream.files.hidden]
        energy_NT = (hidden.to(stream.device, torch.float32) + exact @ weight_EC.mT).square().sum(-1).clamp_min(1e-30)
        for role in ROLES:
            data, context = work.data(index, role, clean=False)
            for place, fit in enumerate(fits[role]):
                found = fit.codec.restore(fit.codec.encode_decode(data.x, context)[1].float(), context)
                out = _attended(chunk, *_read(fit, chunk, found), plan.geometry.head_size)
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


def _read(fit: SchemeFit, chunk: AttentionInputs, found: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that attention reads, one of them decoded: `found` in blocks, the sinks and the rest exact."""
    role, sinks = fit.codec.role, fit.window.sinks
    exact = chunk.v if role == "value" else chunk.k
    rows = found.reshape(len(exact), -1, exact.shape[-1])
    x = torch.cat([exact[:, :sinks], rows[:, sinks:], exact[:, rows.shape[1] :]], 1)
    return (chunk.k, x) if role == "value" else (x, chunk.v)


def _attended(chunk: AttentionInputs, k_NTC: Tensor, v_NTC: Tensor, head_size: int) -> Tensor:
    pair, every = (k_NTC, v_NTC), attention.tiles(k_NTC.shape[1])
    return attention.attend(chunk, pair, pair, every, head_size)


def allocated(asked: Recipe, bits: float, geometry: Geometry, notes: list[dict]) -> tuple[Recipe, float]:
    """The recipe with the best settings within the budget, and the error that they promise.

    notes   of each layer, what `attention_errors` found
    """
    block, options = asked.window.block * geometry.width, served_options(geometry)
    errors = [note[role][1:] for note in notes for role in ROLES]
    costs = [[round(_bits(scheme, geometry) * block) for scheme in options]] * len(errors)
    picks = choose(costs, errors, math.floor(bits * block * len(errors) + 1e-6))
    promised = math.fsum(error[pick] for error, pick in zip(errors, picks, strict=True))
    chosen = [options[pick] for pick in picks]
    for layer in range(geometry.layers):
        asked = asked.with_schemes(layer, *chosen[2 * layer : 2 * layer + 2])
    return asked, promised


def choose(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> list[int]:
    """The option of each place, so that the errors' sum is least and the costs' sum at most `budget`.

    Exactly, by dynamic programming over what may be spent: what was measured need not fall convexly, or at all.

    costs, errors   of each place's options. On equal errors the cheaper option is taken
    """
    least = [min(own) for own in costs]
    room = budget - sum(least)
    if room < 0:
        raise ValueError(f"budget={budget}; the cheapest options cost {sum(least)}: use at least that")
    spare = [[cost - low for cost in own] for own, low in zip(costs, least, strict=True)]
    unit = max(1, math.gcd(*(cost for own in spare for cost in own)))
    orders = [sorted(range(len(own)), key=own.__getitem__) for own in spare]
    best_S = torch.zeros(room // unit + 1, dtype=torch.float64)  # least error of the places so far, by units spent
    picks = []
    for own, error, order in zip(spare, errors, orders, strict=True):
        table_OS = torch.full((len(own), len(best_S)), torch.inf, dtype=torch.float64)
        for row_S, option in zip(table_OS, order, strict=True):
            start = own[option] // unit
            row_S[start:] = best_S[: max(0, len(best_S) - start)] + error[option]
        picks.append(table_OS.argmin(0))
        best_S = table_OS.amin(0)
    left, found = len(best_S) - 1, []
    for own, order, pick_S in zip(reversed(spare), reversed(orders), reversed(picks), strict=True):
        found.append(order[int(pick_S[left])])
        left -= own[found[-1]] // unit
    return found[::-1]


def most_rounds(plan: Plan) -> int:
    """Return the most rounds that a plan takes."""
    return (ROUNDS if plan.budgets else 1) + any(map(share.wanted, plan.recipes))


def rounds(run: Run) -> Iterator[Run]:
    """The draft of recipes whose bits are shared out (`share.py`), if there are any, the run itself, then those its
    budgets need beyond it. Finish each before the next is asked for."""
    sharing = any(map(share.wanted, run.plan.recipes))
    if sharing:
        yield replace(run, plan=share.draft(run.plan), folder=run.folder / DRAFT)
    yield (part := replace(run, round=int(sharing)))
    waiting = [recipe for recipe in run.plan.recipes if recipe.name in run.plan.budgets]
    for number in range(1, ROUNDS):
        if not waiting:
            return
        budgets = {recipe.name: run.plan.budgets[recipe.name] for recipe in waiting}
        chosen = [
            allocated(recipe, budgets[recipe.name], run.plan.geometry, _notes(part, recipe.name)) for recipe in waiting
        ]
        plan = replace(run.plan, recipes=tuple(recipe for recipe, _ in chosen), budgets=budgets)
        part = replace(run, plan=plan, folder=run.folder / f"round-{number}", round=number + sharing)
        yield part
        waiting = [
            recipe for recipe, promised in chosen if abs(total(part, recipe.name) - promised) > TOLERANCE * promised
        ]


def given(run: Run, recipe: Recipe, layer: int) -> Recipe:
    """The recipe as it is fitted in this layer: with what the draft has shared out.

    The notes of all layers of the draft are read once, for the first; the others are given what the one below was."""
    if run.plan.draft or not share.wanted(recipe):
        return recipe
    if layer:
        return Recipe.from_json((checkpoint.record(run.folder, layer - 1) or {})["recipes"][recipe.name])
    draft = replace(run, folder=run.folder / DRAFT)
    return share.shared_out(recipe, run.plan.geometry, _notes(draft, recipe.name, "variances"))


def settled(run: Run, name: str) -> tuple[Run, dict[str, Any]]:
    """Return the round of a run whose artifact to take, and a note on it; without a budget the run itself and {}."""
    if name not in run.plan.budgets:
        return run, {}
    parts = [part for part in rounds(run) if name in part.plan.budgets]
    totals = [total(part, name) for part in parts]
    best = min(range(len(parts)), key=totals.__getitem__)
    noted: dict[str, Any] = {"bits": run.plan.budgets[name], "rounds": totals, "round": best}
    text = (checkpoint.record(run.folder, -1) or {}).get("transfer")
    return parts[best], {"budget": noted | ({"transfer": text} if text else {})}


def total(part: Run, name: str) -> float:
    """The error of a round's own settings, summed over layers, keys and values."""
    return math.fsum(note[role][0] for note in _notes(part, name) for role in ROLES)


def _notes(part: Run, name: str, kind: str = "attention") -> list[dict[str, list[float]]]:
    records = [checkpoint.record(part.folder, layer) for layer in range(part.plan.geometry.layers)]
    return [(record or {})[kind][name] for record in records]
