"""Choose the bits of each layer's keys and values, so that a recipe keeps a budget of bits per element.

`auto` is `aqua-fisher` with the budget as its target: `share.py` gives bits to all latent channels of all layers by one
measure, in two rounds and without trying any setting. Where settings differ in kind, as for `auto-vocab` and for an
engine (`--for vllm`), they are measured one by one:

    round 0   fit the recipe with one setting everywhere, measure every setting in its place in every layer
    choose    the settings with the least sum of errors within the budget (the multiple-choice knapsack, exact)
    round 1   fit the recipe with what was chosen; measure again, now above layers as they will be
    round 2   where the sum of round 1 is more than TOLERANCE off what its choice promised: choose and fit once more

Of all rounds, the one with the least measured sum is the artifact: its recipe names a Scheme per layer, and a runtime
sees a recipe like any other. A round is a run of its own, in a folder of its own, so it resumes like any other.

Of `auto-vocab` settings are AQUA-KV's prediction, from keys and values below both, with what rounds the rest: a basis
in the metric of what errors cost with water-filled bits, with or without a gain, or a HIGGS grid. The first layer's
keys and values may also be stored by token (`vocabulary`): a budget is of bits that grow with tokens, and the table
does not, so that whoever asks for it accepts the table.

For an engine whose layers see their own pages alone (`--for vllm`) the recipe is one after RoPE, and its settings are
those that can be served there: the mean removed, and the widths of what rounds each head of a token by itself.

Source: Shoham and Gersho, 1988 (allocation among arbitrary quantizers by measured error, by a Lagrangian, which reaches
only the budgets on the convex hull); Kellerer, Pferschy and Pisinger, 2004, chapter 11; Li et al., 2025 (KVTuner:
precision pairs of keys and values by layer, searched offline).
Differs: KVTuner prunes and searches with NSGA-II on the model's accuracy; here errors are measured once a setting, are
taken to add up, and the choice is exact.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kvq_calib.run import checkpoint, share
from kvq_calib.run.plan import Plan
from kvq_calib.run.run import Run
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import ROLES, Recipe, Role, Scheme, Window
from kvq_runtime.recipes import aqua_fisher, higgs, turboquant
from kvq_runtime.recipes.aqua_metric import GAIN
from kvq_runtime.stages.fitted_codebook import Vocabulary
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import Hadamard, OutputBasis, QueryBasis
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.vllm import served

BY_TOKEN = "auto-vocab"  # whose first layer may be stored by token
AUTOMATIC = ("auto", BY_TOKEN)
# bits over a basis: of codes, and of codes and gain
WIDTHS = (0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6)
PLAIN = (0.125, 0.25, 0.5)  # without a gain, whose bits count most where there are few
GRIDS = ("1bit", "2bit", "3bit", "4bit")
BASES = {"key": QueryBasis(queries="averaged"), "value": OutputBasis()}
PREDICT = Linear(both=True)
MEAN = Mean()
SERVED = (4, 8)  # bits of plain rounding among the settings of an engine: where codebooks end
ROUNDS = 3
DRAFT = "draft"  # its folder, in the run's own
TOLERANCE = 0.05


@lru_cache(maxsize=8)
def options(geometry: Geometry, role: Role, vocabulary: int = 0) -> list[Scheme]:
    """The settings that each layer's keys, or values, choose from, cheapest first; bases in the metric of errors.

    vocabulary   tokens of it, in a first layer that may be stored by token; 0: it may not
    """
    roundings = [Mixed(target=width, gain=GAIN) for width in WIDTHS] + [Mixed(target=width) for width in PLAIN]
    schemes = [Scheme(rounding, rotate=BASES[role]) for rounding in roundings] + [*map(higgs.scheme, GRIDS)]
    plain, *found = (replace(scheme, predict=PREDICT) for scheme in (higgs.scheme("2bit"), *schemes))

    def check(scheme: Scheme) -> None:
        pair = (scheme, plain) if role == "key" else (plain, scheme)
        Recipe("option", *pair, "pre").check(geometry)

    return _allowed(found, check, geometry, [by_token(vocabulary)] if vocabulary else [])


def by_token(vocabulary: int) -> Scheme:
    """The first layer's keys, or values, by the number of their token."""
    return Scheme(Vocabulary(size=vocabulary), predict=PREDICT)


@lru_cache(maxsize=8)
def served_options(geometry: Geometry, role: Role) -> list[Scheme]:
    """The settings of a recipe that vLLM is to serve, cheapest first: of equal bits, each of them."""
    found = [higgs.scheme(bits, "head", MEAN) for bits in GRIDS]
    found += [turboquant.scheme(bits, predict=MEAN) for bits in turboquant.BITS]
    found += [Scheme(Rtn(bits, "head"), rotate=Hadamard("head"), predict=MEAN) for bits in SERVED]
    return _allowed(found, lambda scheme: served.check(Recipe("option", scheme, scheme), geometry), geometry)


def _allowed(
    schemes: Iterable[Scheme], check: Callable[[Scheme], object], geometry: Geometry, others: Sequence[Scheme] = ()
) -> list[Scheme]:
    """Those that a check does not refuse, and others, cheapest first."""
    found = []
    for scheme in schemes:
        with suppress(ValueError):
            check(scheme)
            found.append(scheme)
    return sorted([*found, *others], key=lambda scheme: _bits(scheme, geometry))


def _bits(scheme: Scheme, geometry: Geometry) -> float:
    return scheme.bits(Window().block, geometry)


def settings(recipe: Recipe, geometry: Geometry, role: Role, vocabulary: int = 0) -> list[Scheme]:
    """Return the settings that a recipe with a budget chooses from: its position decides for which engine.

    vocabulary   tokens of it, if this layer may be stored by token
    """
    return served_options(geometry, role) if recipe.position == "post" else options(geometry, role, vocabulary)


def measured(asked: str, engine: str | None) -> bool:
    """True if the settings of `auto` or `auto-vocab` are measured one by one."""
    return asked == BY_TOKEN or engine is not None


def shared(bits: float, geometry: Geometry) -> Recipe:
    """`aqua-fisher` with at most `bits` bits per element, averaged over all layers. ValueError: no such budget."""
    low, high = (GAIN + 1) / geometry.width, float(Mixed().bits[0])
    if not low <= bits <= high:
        raise ValueError(f"--bits {bits:g}; this model can have {math.ceil(1e3 * low) / 1e3:g} to {high:g}")
    found = aqua_fisher.recipe(math.floor(bits * geometry.width + 1e-6) / geometry.width)
    return replace(found, name=f"auto-{bits:g}bit", summary=f"bits by layer, by the model's gradients, {bits:g} in all")


def recipe(bits: float, geometry: Geometry, vocabulary: int = 0, engine: str | None = None) -> Recipe:
    """The recipe of round 0: in every layer the dearest setting within the budget, and a first layer by token, if it
    may be and is within it. ValueError: no such budget.

    vocabulary   tokens of it, if the first layer may be stored by token
    engine       "vllm": of what vLLM can serve; None: of everything
    """
    among = options if engine is None else served_options
    schemes = {role: among(geometry, role) for role in ROLES}
    ends = [[_bits(own[end], geometry) for own in schemes.values()] for end in (0, -1)]
    low, high = (math.fsum(own) / len(own) for own in ends)
    if not low <= bits <= high:
        where = "this model" if engine is None else f"this model, for {engine},"
        raise ValueError(f"--bits {bits:g}; {where} can have {math.ceil(1e3 * low) / 1e3:g} to {high:.3f}")
    key, value = (_dearest(schemes[role], bits, geometry, engine is None) for role in ROLES)
    name, summary = f"auto-{bits:g}bit", f"bits by layer, chosen by attention's error, {bits:g} in all"
    if engine is not None:
        return Recipe(f"{name}-{engine}", key, value, summary=f"{summary}, for {engine}")
    layers = {}
    if vocabulary and _bits(first := by_token(vocabulary), geometry) <= bits:
        layers = {0: (first, first)}
    return Recipe(f"{name}-vocab" if vocabulary else name, key, value, "pre", layers, summary)


def _dearest(schemes: list[Scheme], bits: float, geometry: Geometry, bases: bool) -> Scheme:
    """The dearest setting within the budget; of bases, where there are any."""
    fitting = (scheme for scheme in schemes if scheme.quantize.takes_latents or not bases)
    return [scheme for scheme in fitting if _bits(scheme, geometry) <= bits][-1]


def allocated(
    asked: Recipe, bits: float, geometry: Geometry, notes: list[dict], vocabulary: int = 0
) -> tuple[Recipe, float]:
    """The recipe with the best settings within the budget, and the error that they promise.

    notes        of each layer, what `sensitivity.attention_errors` found
    vocabulary   tokens of it, if the first layer may be stored by token
    """
    block = asked.window.block * geometry.width
    sizes = [vocabulary, *([0] * (geometry.layers - 1))]
    places = [settings(asked, geometry, role, size) for size in sizes for role in ROLES]
    costs = [[round(_bits(scheme, geometry) * block) for scheme in own] for own in places]
    errors = [note[role][1:] for note in notes for role in ROLES]
    picks = choose(costs, errors, math.floor(bits * block * len(errors) + 1e-6))
    promised = math.fsum(error[pick] for error, pick in zip(errors, picks, strict=True))
    chosen = [own[pick] for own, pick in zip(places, picks, strict=True)]
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
            allocated(
                recipe, budgets[recipe.name], run.plan.geometry, _notes(part, recipe.name),
                run.plan.vocabularies.get(recipe.name, 0),
            )
            for recipe in waiting
        ]  # fmt: skip
        plan = replace(run.plan, recipes=tuple(recipe for recipe, _ in chosen), budgets=budgets)
        part = replace(run, plan=plan, folder=run.folder / f"round-{number}", round=number + sharing)
        yield part
        waiting = [
            recipe for recipe, promised in chosen if abs(total(part, recipe.name) - promised) > TOLERANCE * promised
        ]


def given(run: Run, recipe: Recipe, layer: int) -> Recipe:
    """The recipe as it is fitted in this layer: with what the draft has shared out, or as the draft's own.

    The notes of all layers of the draft are read once, for the first; the others are given what the one below was, but
    for steps of entropy-coded places, which also depend on what those below take."""
    if run.plan.draft:
        return share.drafted(recipe)
    if not share.wanted(recipe):
        return recipe
    if layer and not share.coded(recipe):
        return Recipe.from_json((checkpoint.record(run.folder, layer - 1) or {})["recipes"][recipe.name])
    taken = [(checkpoint.record(run.folder, n) or {})["taken"][recipe.name] for n in range(layer)]
    draft = replace(run, folder=run.folder / DRAFT)
    return share.shared_out(recipe, run.plan.geometry, _notes(draft, recipe.name, "variances"), taken)


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
