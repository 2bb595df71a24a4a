"""Share the bits of a recipe out among layers, keys and values, by the variances that were measured in all of them.

    draft   fit the recipe with its target in every place, to a part of the text; note the latent variances λ of each,
            by what errors cost
    then    fill all latent channels of all places in one order, and fit with the targets that this gives each

Water-filling wants costs in one unit. An error e of one token, read with weight a, adds to the stream h

    of a value   Σ a² ‖W e‖² / ‖h‖²                        W a query head's columns of the output projection
    of a key     Σ a² (q e)² / D · E‖W (v - μ)‖² / ‖h‖²    a score moved by q e / √D moves attention among values v

summed over the query heads that read the KV head; a² is common to the two. So λ is multiplied with the mean of Σ WᵀW
over channels, and with that of E[q qᵀ] times what values vary behind W, over the mean energy of the stream that the
layer reads: errors relative to it compare between layers. The sinks do not count in that energy: from some layer on the
first token of a real model has thousands of times the energy of any other. That later layers are predicted from what an
error is in, it does not count. Bases in the metric of gradients are in nats: there λ needs no cost (`gradients.py`).

Where files are entropy-coded (`dead_zone`) one step does that, so that files take the bits that their recipe promises:

    draft     notes what files would take of each place at each of STEPS
    first     the step, in √nats, at which that is the target in all, is everyone's
    layer l   the layers below have been fitted, and what their codes take of text that they were not fitted to is
              known: of layer l and those above, the step is that at which they take what is left

A draft promises too little: its predictions are in full precision and from layers that are coded otherwise, and of
4,096 tokens; SmolLM2's codes take 1.3 times as much. So layers above are taken to grow as those below have grown: as if
all latents were larger than the draft's by one factor, that at which the draft's rates come to what was measured. Bits
that a layer takes too many are thus spread over all above it. No step is more than MOST times, or less than a MOST-th
of, the first one: where few layers are left, quality goes before the promise. Of a plan that holds no sequences out,
what the fit's own text takes is what is known, which is less than other text will.

The target is of files of prefixes of `block_file.LENGTH` tokens: sinks and frames are taken off before. All that a step
depends on are the notes of the draft and of the layers below: a run that was killed goes on with the same.

Source: Cover and Thomas, 2006, section 10.3.3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.latent import water_fill, where_it_falls_to_0
from kvq_calib.fit.statistics import LayerQueries
from kvq_calib.run.plan import Plan
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.prefix import block_file
from kvq_runtime.recipe import Recipe, Role, Scheme, with_each

# in √nats, at which the rates of places are noted
STEPS = tuple(2.0 ** (place / 2) for place in range(-28, 3))
MOST = 4.0
ROWS = 1024  # residuals that a draft is fitted to

Curve = Sequence[float]  # bits per element at each of STEPS


def shares(scheme: Scheme) -> bool:
    """True if the scheme's bits are a part of the recipe's."""
    return getattr(scheme.quantize, "shared", False)


def wanted(recipe: Recipe) -> bool:
    """True if any bits of the recipe are shared out."""
    return any(map(shares, recipe.schemes))


def coded(recipe: Recipe) -> bool:
    """True if files of the recipe are entropy-coded."""
    return any(scheme.quantize.at_rest for scheme in recipe.schemes)


def draft(plan: Plan) -> Plan:
    """The plan of the draft: of the recipes that share, to the first sequences."""
    recipes = tuple(map(drafted, filter(wanted, plan.recipes)))
    return replace(plan.beginning(), recipes=recipes, draft=True, budgets={}, vocabularies={})


def drafted(recipe: Recipe) -> Recipe:
    """The recipe as it is fitted for its variances alone: without gains to choose or predictors in 4 bits, which cost
    more to fit than all else, and change what is left by less than bits are shared by."""

    def plain(scheme: Scheme) -> Scheme:
        if not shares(scheme):
            return scheme
        predict = scheme.predict and scheme.predict.in_full()
        quantize: Any = scheme.quantize
        quantize = quantize if quantize.at_rest else replace(quantize, gain=0, weighed=False)
        return replace(scheme, quantize=quantize, predict=predict)

    return with_each(recipe, plain)


def costs(
    weight_EQ: Tensor, queries: LayerQueries, variance_C: Tensor, energy: float, geometry: Geometry
) -> dict[str, float]:
    """Return the cost of a unit of error, by role: averaged over channels, relative to the energy of the stream.

    weight_EQ    of the output projection          variance_C   of values, by channel          energy   mean ‖h‖²
    """
    heads = weight_EQ.double().unflatten(1, (geometry.kv_heads, -1, geometry.head_size))
    output_HGD = heads.square().sum(0)  # the diagonals of WᵀW
    spread = (output_HGD * variance_C.double().unflatten(0, (geometry.kv_heads, 1, -1)).to(output_HGD)).sum(-1).mean()
    loudness = queries.before.diagonal(dim1=-2, dim2=-1).mean()  # RoPE changes no length
    query_heads = output_HGD.shape[1]
    key = query_heads * loudness * spread.to(loudness) / geometry.head_size
    return {"key": float(key) / energy, "value": float(output_HGD.sum(1).mean()) / energy}


def shared_out(
    recipe: Recipe, geometry: Geometry, notes: Sequence[Mapping[str, Any]], taken: Sequence[Mapping[str, Any]] = ()
) -> Recipe:
    """The recipe with a target of its own in every place, as many bits in all as the targets it had; or with a step.

    notes   of each layer, by role: latent variances times what errors cost; of entropy-coded places, `rates` at
            STEPS and the `scale` of latents in the unit of these
    taken   of entropy-coded places of the layers that are fitted, by role: their `step`, and the `bits` per element
            that they take of files
    """
    places: list[tuple[int, Role]] = [
        (n, role) for n in range(geometry.layers) for role in ROLES if shares(recipe.scheme(n, role))
    ]
    stages: list[Any] = [recipe.scheme(layer, role).quantize for layer, role in places]
    if all(stage.at_rest for stage in stages):
        target = sum(stage.target for stage in stages) / len(stages) - block_file.beside(recipe, geometry)
        steps = _steps(places, notes, taken, target)
        return _with(recipe, {
            place: replace(stage, step=steps[place], shared=False)
            for place, stage in zip(places, stages, strict=True) if place in steps
        })  # fmt: skip
    budget = sum(stage.budget(geometry.width) for stage in stages)
    if len({stage.bits for stage in stages}) > 1:
        raise ValueError("keys and values that share bits have unlike `bits`; give both the same")
    each = torch.tensor([stage.distortions() for stage in stages], dtype=torch.float64)
    distortions = each.repeat_interleave(geometry.width, 0)
    variances = torch.tensor([notes[layer][role] for layer, role in places], dtype=torch.float64)
    bits = torch.tensor(water_fill(variances.flatten(), budget, distortions)).view(len(places), -1).sum(1).tolist()
    for place in range(len(bits)):
        if bits[place] == 0:  # a scheme stores something
            bits[bits.index(max(bits))] -= 1
            bits[place] = 1
    found = {
        place: replace(stage, target=(own + stage.gain) / geometry.width, shared=False)
        for place, stage, own in zip(places, stages, bits, strict=True)
    }
    return _with(recipe, found)


def _steps(
    places: Sequence[tuple[int, Role]], notes: Sequence[Mapping[str, Any]], taken: Sequence[Mapping[str, Any]],
    target: float,
) -> dict[tuple[int, Role], float]:  # fmt: skip
    """The steps of entropy-coded places that are not fitted yet, each in its own unit."""
    noted = {place: notes[place[0]][place[1]] for place in places}
    step = first_step([note["rates"] for note in noted.values()], target)
    above = {place: note for place, note in noted.items() if place[0] >= len(taken)}
    known = [(noted[place], taken[place[0]][place[1]]) for place in places if place not in above]
    if known:  # none above layers that are coded otherwise, or not at all
        below = [(note["rates"], own["step"] * note["scale"], own["bits"]) for note, own in known]
        step = next_step(below, [note["rates"] for note in above.values()], target, step)
    return {place: float(f"{step / note['scale']:.6g}") for place, note in above.items()}


def _with(recipe: Recipe, found: Mapping[tuple[int, Role], Any]) -> Recipe:
    """The recipe with these quantizers in their places."""
    for layer in sorted({layer for layer, _ in found}):
        key, value = (
            replace(scheme, quantize=found.get((layer, role), scheme.quantize))
            for role, scheme in zip(ROLES, recipe.at(layer), strict=True)
        )
        recipe = recipe.with_schemes(layer, key, value)
    return replace(recipe, key=_alone(recipe.key), value=_alone(recipe.value))  # which every layer has its own of


def _alone(scheme: Scheme) -> Scheme:
    stage: Any = scheme.quantize
    return replace(scheme, quantize=replace(stage, shared=False)) if shares(scheme) else scheme


def first_step(curves: Sequence[Curve], target: float) -> float:
    """The step at which places take `target` bits per element in the mean. ValueError: there is none."""
    low, high = (math.fsum(curve[end] for curve in curves) / len(curves) for end in (-1, 0))
    if not low <= target <= high:
        raise ValueError(
            f"target: {target:.3g} bits but for sinks and frames; this model can have {low:.3g} to {high:.3g}"
        )
    return _step(where_it_falls_to_0(lambda at: _sum(curves, at) - target * len(curves), 0, len(STEPS) - 1))


def next_step(
    below: Sequence[tuple[Curve, float, float]], above: Sequence[Curve], target: float, begun: float
) -> float:
    """The step of the places above, at which all take `target` bits per element in the mean.

    below   of each place that is fitted its curve, the step that it has, and the bits per element that it takes
    begun   the step that all were to have
    """
    spent = math.fsum(bits for *_, bits in below)
    places = [(curve, _place(step)) for curve, step, _ in below]
    far = len(STEPS) - 1
    grown = where_it_falls_to_0(lambda by: spent - math.fsum(_at(curve, at - by) for curve, at in places), -far, far)
    left = target * (len(below) + len(above)) - spent
    reach, start = 2 * math.log2(MOST), _place(begun)
    return _step(where_it_falls_to_0(lambda at: _sum(above, at - grown) - left, start - reach, start + reach))


def _sum(curves: Sequence[Curve], at: float) -> float:
    return math.fsum(_at(curve, at) for curve in curves)


def _at(curve: Curve, at: float) -> float:
    """Bits at a place among STEPS, between two of them in proportion; beyond the last, as there."""
    at = min(max(at, 0.0), len(STEPS) - 1.0)
    low = min(int(at), len(STEPS) - 2)
    return curve[low] + (at - low) * (curve[low + 1] - curve[low])


def _place(step: float) -> float:
    return 2 * math.log2(step) - 2 * math.log2(STEPS[0])


def _step(place: float) -> float:
    return STEPS[0] * 2.0 ** (place / 2)
