"""Refuse a recipe that an engine cannot take, and name the nearest that it can.

An engine is a name and a refusal: why it cannot take a recipe on a model of this shape, a clause; None: it can.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, presets


@dataclass(frozen=True)
class Engine:
    """An engine that takes some recipes.

    cannot   begins the sentence of a refusal, before the recipe's name: "vLLM cannot serve"
    can      ends "the nearest recipe that it can ..."
    """

    cannot: str
    can: str
    refusal: Callable[[Recipe, Geometry], str | None]


def check(engine: Engine, recipe: Recipe, geometry: Geometry) -> None:
    """Raise ValueError, a sentence that names the nearest recipe that it takes, unless it takes this one."""
    reason = engine.refusal(recipe, geometry)
    if reason is not None:
        near = nearest(engine, recipe, geometry)
        raise ValueError(
            f"{engine.cannot} {recipe.name}: {reason}; the nearest recipe that it can {engine.can} is {near.name}, "
            f"{bits(near, geometry):.3g} bits (docs/serve-vllm.md lists all)"
        )
    recipe.check(geometry)


def nearest(engine: Engine, recipe: Recipe, geometry: Geometry) -> Recipe:
    """The recipe without calibration that it takes and whose bits are nearest."""
    wanted = bits(recipe.of_vocabulary(1 << 17), geometry)  # of a large model; a token's number costs 17 bits
    return min(plain(engine, geometry), key=lambda one: abs(bits(one, geometry) - wanted))


@lru_cache(maxsize=16)
def plain(engine: Engine, geometry: Geometry) -> tuple[Recipe, ...]:
    """The recipes that need no artifact and that it takes on this shape."""
    found = (recipe for recipe in presets().values() if not recipe.fitted and engine.refusal(recipe, geometry) is None)
    return tuple(recipe for recipe in found if _fits(recipe, geometry))


def bits(recipe: Recipe, geometry: Geometry) -> float:
    """Asymptotic bits per element, the mean over layers, keys and values."""
    block = recipe.window.block
    if not recipe.layers:
        geometry = replace(geometry, layers=1)
    each = [
        scheme.bits(block, geometry, torch.bfloat16) for layer in range(geometry.layers) for scheme in recipe.at(layer)
    ]
    return sum(each) / len(each)


def _fits(recipe: Recipe, geometry: Geometry) -> bool:
    try:
        recipe.check(geometry)
    except ValueError:
        return False
    return True
