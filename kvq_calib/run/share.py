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

Source: Cover and Thomas, 2006, section 10.3.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.latent import water_fill
from kvq_calib.fit.statistics import LayerQueries
from kvq_calib.run.plan import Plan
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.recipe import Recipe, Role, Scheme, with_each

ROWS = 1024  # residuals that a draft is fitted to


def shares(scheme: Scheme) -> bool:
    """True if the scheme's bits are a part of the recipe's."""
    return getattr(scheme.quantize, "shared", False)


def wanted(recipe: Recipe) -> bool:
    """True if any bits of the recipe are shared out."""
    return any(map(shares, recipe.schemes))


def draft(plan: Plan) -> Plan:
    """The plan of the draft: of the recipes that share, to the first sequences."""
    recipes = tuple(map(drafted, filter(wanted, plan.recipes)))
    return replace(plan.beginning(), recipes=recipes, draft=True, budgets={})


def drafted(recipe: Recipe) -> Recipe:
    """The recipe as it is fitted for its variances alone: without gains to choose or predictors in 4 bits, which cost
    more to fit than all else, and change what is left by less than bits are shared by."""

    def plain(scheme: Scheme) -> Scheme:
        if not shares(scheme):
            return scheme
        predict = scheme.predict and scheme.predict.in_full()
        quantize: Any = scheme.quantize
        quantize = replace(quantize, gain=0, weighed=False)
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


def shared_out(recipe: Recipe, geometry: Geometry, notes: Sequence[Mapping[str, Any]]) -> Recipe:
    """The recipe with a target of its own in every place, as many bits in all as the targets it had.

    notes   of each layer, by role: latent variances times what errors cost
    """
    places: list[tuple[int, Role]] = [
        (n, role) for n in range(geometry.layers) for role in ROLES if shares(recipe.scheme(n, role))
    ]
    stages: list[Any] = [recipe.scheme(layer, role).quantize for layer, role in places]
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
