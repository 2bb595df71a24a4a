"""Divide a budget of bits among layers, keys and values, by the cost of errors in each place.

`aqua-fisher-*` divides its bits over all latent channels by their variances; `auto` is this recipe with paths that
weigh tokens, and a budget as its target:

    draft   fit the recipe with its target in every place, to the beginning of the text; note each place's latent
            variances λ times the cost of its errors
    then    fill the latent channels of all places in one order, and fit with the resulting targets

For an attention kernel (`--for kernel`) `auto` is `fisher-head`, which divides its bits alike and reads no layer below.

For vLLM (`--for vllm`), whose layers read their own pages alone, `auto` is a recipe after RoPE: the mean removed, and a
width of the codebook that rounds each head of a token by itself. While a layer is fitted each of these settings decodes
held-out chunks; then an exact knapsack takes the settings with the least sum of costs within the budget.

Costs are in nats, by the second moments of the model's gradients (`gradients.py`): they compare between layers, and
between keys and values. They do not count the predictions of later layers.

Source: Cover and Thomas, 2006, section 10.3.3 (reverse water-filling); Shoham and Gersho, 1988 (allocation among
arbitrary quantizers by measured error); Kellerer, Pferschy and Pisinger, 2004, chapter 11 (the knapsack).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kvq_calib.fit.latent import water_fill
from kvq_calib.run.plan import Plan, divides, is_divided
from kvq_calib.run.run import Run
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.recipe import Recipe, Role, Scheme, Window, with_each
from kvq_runtime.recipes import aqua_fisher, fisher, higgs, turboquant
from kvq_runtime.recipes.aqua_fisher import GAIN
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.vllm import plugin

AUTOMATIC = "auto"
GRIDS = ("1bit", "2bit", "3bit", "4bit")
MEAN = Mean()
ROUNDED = (4, 8)  # bits of plain rounding among vLLM's settings: where codebooks end
DRAFT = "draft"  # its folder, in the run's own
DRAFT_ROWS = 1024  # residuals that a draft is fitted to


def auto_recipe(bits: float, geometry: Geometry) -> Recipe:
    """`aqua-fisher` with paths that weigh tokens and at most `bits` bits per element, averaged over all layers.

    ValueError: no such budget."""
    low, high = (GAIN + 1) / geometry.width, float(Mixed().bits[0])
    _check_bits(bits, low, high, "this model")
    plain = aqua_fisher.aqua_fisher("auto", math.floor(bits * geometry.width + 1e-6) / geometry.width)
    weighed = with_each(plain, lambda scheme: replace(scheme, quantize=replace(scheme.quantize, weighed=True)))
    summary = f"bits by layer, by the model's gradients, {bits:g} in all"
    return replace(weighed, name=f"auto-{bits:g}bit", summary=summary)


def auto_kernel_recipe(bits: float, geometry: Geometry) -> Recipe:
    """Return `fisher-head` with at most `bits` bits per element. ValueError: no such budget."""
    _check_bits(
        bits, (fisher.SLAB + fisher.GAIN) / geometry.head_size, float(Mixed().bits[0]), "this model, for a kernel,"
    )
    whole = math.floor(bits * geometry.width + 1e-6) / geometry.width
    summary = f"bits by layer, by the model's gradients, {bits:g} in all, for a kernel"
    return replace(fisher.fisher("auto", whole, "head"), name=f"auto-{bits:g}bit-kernel", summary=summary)


def auto_vllm_recipe(bits: float, geometry: Geometry) -> Recipe:
    """Return the recipe whose settings a budget chooses for vLLM: in every layer the dearest within the budget.

    ValueError: no such budget."""
    settings = vllm_settings(geometry)
    _check_bits(bits, _bits(settings[0], geometry), _bits(settings[-1], geometry), "this model, for vllm,")
    dearest = [scheme for scheme in settings if _bits(scheme, geometry) <= bits][-1]
    summary = f"bits by layer, chosen by measured errors, {bits:g} in all, for vllm"
    return Recipe(f"auto-{bits:g}bit-vllm", dearest, dearest, summary=summary)


def _check_bits(bits: float, low: float, high: float, subject: str) -> None:
    if not low <= bits <= high:
        raise ValueError(f"--bits {bits:g}; {subject} can have {math.ceil(1e3 * low) / 1e3:g} to {high:.4g}")


@lru_cache(maxsize=8)
def vllm_settings(geometry: Geometry) -> list[Scheme]:
    """Return the settings for the keys, or values, of a layer that vLLM serves, cheapest first."""
    schemes = [higgs.scheme(bits, "head", MEAN) for bits in GRIDS]
    schemes += [turboquant.scheme(bits, predict=MEAN) for bits in turboquant.BITS]
    schemes += [Scheme(Rtn(bits, "head"), rotate=Hadamard("head"), predict=MEAN) for bits in ROUNDED]
    served = []
    for scheme in schemes:
        with suppress(ValueError):
            plugin.check_recipe(Recipe("setting", scheme, scheme).check(geometry))
            served.append(scheme)
    return sorted(served, key=lambda scheme: _bits(scheme, geometry))


def _bits(scheme: Scheme, geometry: Geometry) -> float:
    return scheme.bits(Window().block, geometry)


def count_rounds(plan: Plan) -> int:
    """Return the number of passes over the layers: two with a draft, else one."""
    return 1 + any(map(is_divided, plan.recipes))


def rounds(run: Run) -> Iterator[Run]:
    """Yield the draft of recipes that divide bits, if any, then the run itself; finish the first before the second."""
    count = count_rounds(run.plan)
    if count > 1:
        yield replace(run, plan=draft_plan(run.plan), folder=run.folder / DRAFT)
    yield replace(run, round=count - 1)


def draft_plan(plan: Plan) -> Plan:
    """Plan the draft: the recipes that divide bits, on the beginning of the text."""
    recipes = tuple(map(_drafted, filter(is_divided, plan.recipes)))
    return replace(plan.beginning(), recipes=recipes, draft=True, budgets={})


def _drafted(recipe: Recipe) -> Recipe:
    """Return the recipe without gains and predictors in 4 bits: they take most of the time of a fit, and change the
    variances little."""

    def plain(scheme: Scheme) -> Scheme:
        if not divides(scheme):
            return scheme
        predict: Any = scheme.predict
        predict = replace(predict, storage="bf16") if hasattr(predict, "storage") else predict
        quantize: Any = scheme.quantize
        quantize = replace(quantize, gain=0, gains=1, weighed=False)
        return replace(scheme, quantize=quantize, predict=predict)

    return with_each(recipe, plain)


def divided(recipe: Recipe, geometry: Geometry, notes: Sequence[Mapping[str, Any]]) -> Recipe:
    """Return the recipe with a target in every place, and equal bits in all.

    notes   of each layer, by role: latent variances times the cost of errors
    """
    places: list[tuple[int, Role]] = [
        (n, role) for n in range(geometry.layers) for role in ROLES if divides(recipe.scheme(n, role))
    ]
    stages: list[Any] = [recipe.scheme(layer, role).quantize for layer, role in places]
    units = {stage.unit(recipe.scheme(*place), geometry) for place, stage in zip(places, stages, strict=True)}
    if len(units) > 1:
        raise ValueError("keys and values that share bits have unlike slabs or bases; give both the same")
    unit = units.pop()
    budget = sum(stage.budget(geometry.width, geometry.kv_heads) for stage in stages) // unit
    if len({stage.bits for stage in stages}) > 1:
        raise ValueError("keys and values that share bits have unlike `bits`; give both the same")
    each = torch.tensor([stage.distortions() for stage in stages], dtype=torch.float64)
    distortions = each.repeat_interleave(geometry.width // unit, 0)
    variances = torch.tensor([notes[layer][role] for layer, role in places], dtype=torch.float64)
    filled = water_fill(variances.flatten().unflatten(0, (-1, unit)).sum(1), budget, distortions)
    bits = torch.tensor(filled).view(len(places), -1).sum(1).tolist()
    for place in range(len(bits)):
        if bits[place] == 0:  # a scheme stores something
            bits[bits.index(max(bits))] -= 1
            bits[place] = 1
    stages_by_place = {
        place: replace(stage, target=_target(stage, unit * own, geometry), shared=False)
        for place, stage, own in zip(places, stages, bits, strict=True)
    }
    for layer in sorted({layer for layer, _ in places}):
        key, value = (
            replace(scheme, quantize=stages_by_place.get((layer, role), scheme.quantize))
            for role, scheme in zip(ROLES, recipe.at(layer), strict=True)
        )
        recipe = recipe.with_schemes(layer, key, value)
    return replace(recipe, key=_alone(recipe.key), value=_alone(recipe.value))


def _target(stage: Any, codes: int, geometry: Geometry) -> float:
    """Return the target of a place with so many bits of codes a token."""
    return (codes + stage.gain * stage.gain_count(geometry.kv_heads)) / geometry.width


def _alone(scheme: Scheme) -> Scheme:
    stage: Any = scheme.quantize
    return replace(scheme, quantize=replace(stage, shared=False)) if divides(scheme) else scheme


def chosen(
    recipe: Recipe, bits: float, geometry: Geometry, notes: Sequence[Mapping[str, Any]]
) -> tuple[Recipe, list[dict[str, Any]]]:
    """Return the recipe with the best of vLLM's settings within a budget, and their measures by layer and role.

    notes   of each layer, by role: measures of every setting
    """
    settings, block = vllm_settings(geometry), recipe.window.block * geometry.width
    places = [(layer, role) for layer in range(geometry.layers) for role in ROLES]
    errors = [[measures["nats"] for measures in notes[layer][role]] for layer, role in places]
    sizes = [round(_bits(scheme, geometry) * block) for scheme in settings]
    picks = dict(zip(places, choose(sizes, errors, math.floor(bits * block * len(places) + 1e-6)), strict=True))
    for layer in range(geometry.layers):
        recipe = recipe.with_schemes(layer, *(settings[picks[layer, role]] for role in ROLES))
    return recipe, [{role: note[role][picks[layer, role]] for role in ROLES} for layer, note in enumerate(notes)]


def choose(costs: Sequence[int], errors: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Choose an option for each place: the least sum of errors at a sum of costs of at most `budget`.

    Exact, by dynamic programming over the budget: errors need not be convex, or fall at all.

    costs    of the options, ascending
    errors   of each place's options; of equal ones the cheaper option is chosen
    """
    room = budget - costs[0] * len(errors)
    if room < 0:
        raise ValueError(f"budget={budget}; the cheapest options cost {costs[0] * len(errors)}: use at least that")
    spare = [cost - costs[0] for cost in costs]
    unit = max(1, math.gcd(*spare))
    best_S = torch.zeros(room // unit + 1, dtype=torch.float64)  # least error of the places so far, by units spent
    picks = []
    for error in errors:
        table_OS = torch.full((len(spare), len(best_S)), torch.inf, dtype=torch.float64)
        for row_S, cost, one in zip(table_OS, spare, error, strict=True):
            start = cost // unit
            row_S[start:] = best_S[: max(0, len(best_S) - start)] + one
        picks.append(table_OS.argmin(0))
        best_S = table_OS.amin(0)
    left, options = len(best_S) - 1, []
    for pick_S in reversed(picks):
        options.append(int(pick_S[left]))
        left -= spare[options[-1]] // unit
    return options[::-1]
