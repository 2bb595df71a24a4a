"""Choose the bits of each layer's keys and values, so that a recipe keeps a budget of bits per element.

    round 0   fit the recipe with one setting everywhere, measure every setting in its place in every layer
    choose    the settings with the least sum of errors within the budget (`fit/allocate.py`, exact)
    round 1   fit the recipe with what was chosen; measure again, now above layers as they will be
    round 2   where the sum of round 1 is more than TOLERANCE off what its choice promised: choose and fit once more

Of all rounds, the one with the least measured sum is the artifact: its recipe names a Scheme per layer, and a runtime
sees a recipe like any other. A round is a run of its own, in a folder of its own, so it resumes like any other.

Settings are AQUA-KV's prediction with what rounds the rest: SVDq's basis with water-filled bits, or a HIGGS grid.

Source: Shoham and Gersho, 1988 (allocation among arbitrary quantizers by measured error); Li et al., 2025 (KVTuner:
precision pairs of keys and values by layer, searched offline).
Differs: KVTuner prunes and searches with NSGA-II on the model's accuracy; here errors are measured once a setting, are
taken to add up, and the choice is exact.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvq_calib.fit.allocate import choose
from kvq_calib.run import checkpoint, share
from kvq_calib.run.plan import Plan
from kvq_calib.run.run import Run
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import ROLES, Recipe, Scheme, Window
from kvq_runtime.recipes import aqua_klt, higgs
from kvq_runtime.stages.predict import Linear

WIDTHS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6)  # bits over a basis
GRIDS = ("1bit", "2bit", "3bit", "4bit")
ROUNDS = 3
TOLERANCE = 0.05


@lru_cache(maxsize=8)
def options(geometry: Geometry) -> list[Scheme]:
    """The settings that each layer's keys and values choose from, cheapest first."""
    schemes = [*map(aqua_klt.scheme, WIDTHS), *map(higgs.scheme, GRIDS)]
    found = [replace(scheme, predict=Linear()) for scheme in schemes]
    return sorted(
        (scheme for scheme in found if _possible(scheme, geometry)),
        key=lambda scheme: scheme.bits(Window().block, geometry),
    )


def _possible(scheme: Scheme, geometry: Geometry) -> bool:
    try:
        Recipe("option", scheme, scheme, "pre").check(geometry)
    except ValueError:
        return False
    return True


def recipe(bits: float, geometry: Geometry) -> Recipe:
    """The recipe of round 0: in every layer the dearest basis within the budget. ValueError: no such budget."""
    schemes = options(geometry)
    low, high = (scheme.bits(Window().block, geometry) for scheme in (schemes[0], schemes[-1]))
    if not low <= bits <= high:
        raise ValueError(f"--bits {bits:g}; this model can have {math.ceil(1e3 * low) / 1e3:g} to {high:.3f}")
    scheme = [
        scheme for scheme in schemes if scheme.quantize.takes_latents and scheme.bits(Window().block, geometry) <= bits
    ][-1]
    name = f"auto-{bits:g}bit"
    return Recipe(name, scheme, scheme, "pre", summary=f"bits by layer, chosen by attention's error, {bits:g} in all")


def allocated(asked: Recipe, bits: float, geometry: Geometry, notes: list[dict]) -> tuple[Recipe, float]:
    """The recipe with the best settings within the budget, and the error that they promise.

    notes   of each layer, what `sensitivity.attention_errors` found
    """
    schemes, block = options(geometry), asked.window.block * geometry.width
    costs = [round(scheme.bits(Window().block, geometry) * block) for scheme in schemes]
    errors = [note[role][1:] for note in notes for role in ROLES]
    budget = math.floor(bits * block * len(errors) + 1e-6)
    picks = choose([costs] * len(errors), errors, budget)
    promised = math.fsum(error[pick] for error, pick in zip(errors, picks, strict=True))
    for layer in range(geometry.layers):
        key, value = picks[2 * layer : 2 * layer + 2]
        asked = asked.with_schemes(layer, schemes[key], schemes[value])
    return asked, promised


def most_rounds(plan: Plan) -> int:
    """How many rounds a plan takes at the most."""
    return ROUNDS if plan.budgets else 2 if any(map(share.wanted, plan.recipes)) else 1


def rounds(run: Run) -> Iterator[Run]:
    """The run itself, then those its budgets need beyond it. Finish each before the next is asked for.

    Recipes whose bits are shared out (`share.py`) need one more, which is the first of these."""
    yield run
    part, waiting = run, [recipe for recipe in run.plan.recipes if recipe.name in run.plan.budgets]
    sharing = [recipe for recipe in run.plan.recipes if share.wanted(recipe)]
    for number in range(1, ROUNDS):
        if not waiting and not (number == 1 and sharing):
            return
        budgets = {recipe.name: run.plan.budgets[recipe.name] for recipe in waiting}
        chosen = [
            allocated(recipe, budgets[recipe.name], run.plan.geometry, _notes(part, recipe.name)) for recipe in waiting
        ]
        shared = [
            share.shared_out(recipe, run.plan.geometry, _notes(run, recipe.name, "variances"))
            for recipe in sharing
            if number == 1
        ]
        plan = replace(run.plan, recipes=(*(recipe for recipe, _ in chosen), *shared), budgets=budgets)
        part = replace(run, plan=plan, folder=run.folder / f"round-{number}", round=number)
        yield part
        waiting = [
            recipe for recipe, promised in chosen if abs(total(part, recipe.name) - promised) > TOLERANCE * promised
        ]


def settled(run: Run, name: str) -> tuple[Run, dict[str, Any]]:
    """Of a finished run's rounds the one whose artifact to take, and what to note of it: without a budget nothing, and
    the run itself, or the round for which the recipe's bits were shared out."""
    if name not in run.plan.budgets:
        for part in rounds(run):
            recipe = next((recipe for recipe in part.plan.recipes if recipe.name == name), None)
            if recipe is not None and not share.wanted(recipe):
                return part, {}
    parts = [part for part in rounds(run) if name in part.plan.budgets]
    totals = [total(part, name) for part in parts]
    best = min(range(len(parts)), key=totals.__getitem__)
    return parts[best], {"budget": {"bits": run.plan.budgets[name], "rounds": totals, "round": best}}


def total(part: Run, name: str) -> float:
    """The error of a round's own settings, summed over layers, keys and values."""
    return math.fsum(note[role][0] for note in _notes(part, name) for role in ROLES)


def _notes(part: Run, name: str, kind: str = "attention") -> list[dict[str, list[float]]]:
    records = [checkpoint.record(part.folder, layer) for layer in range(part.plan.geometry.layers)]
    return [(record or {})[kind][name] for record in records]
