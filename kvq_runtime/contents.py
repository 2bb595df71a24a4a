"""Say what an encoded block and an artifact hold: names, shapes, dtypes, and what a stored element costs."""

import math

import torch

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import HALVES, Half, Recipe, Side
from kvq_runtime.stages.predict import Specs
from kvq_runtime.stages.rotate import Basis


def fields(side: Side, geometry: Geometry, dtype: torch.dtype) -> Specs:
    """Names, shapes and dtypes of one encoded block of a side; `dtype` is the model's."""
    rows, width = (side.block, geometry.width) if side.axis == "token" else (geometry.width, side.block)
    found = side.quantize.fields(rows, width, geometry, dtype)
    return found if side.correct is None else found | side.correct.fields(side.block, geometry)


def bits(side: Side, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """What a stored element of a side costs, in bits, without fitted tensors."""
    stored = sum(math.prod(shape) * kind.itemsize for shape, kind in fields(side, geometry, dtype).values())
    return 8 * stored / (side.block * geometry.width)


def specs(recipe: Recipe, layer: int, half: Half, geometry: Geometry) -> Specs:
    """The tensors an artifact holds for one side of one layer: {"predict.weight": (shape, dtype), ...}."""
    if recipe.online is not None:
        return {}
    side = recipe.side(layer, half)
    keys, below = side.inputs(layer, half)
    predictor, width, found = side.predictor(layer, half), geometry.width, {}
    if predictor is not None:
        found["predict"] = predictor.specs(width * (keys + len(below)), width)
    if isinstance(side.rotate, Basis):
        found["rotate"] = side.rotate.specs(width, side.quantize.stored(width))
    if side.fitted_quantizer:
        found["quantize"] = side.quantize.specs(width, geometry)
    if side.feedback is not None:
        found["feedback"] = side.feedback.specs(geometry)
    if side.correct is not None:
        found["correct"] = side.correct.specs()
    return {f"{stage}.{name}": spec for stage, fields in found.items() for name, spec in fields.items()}


def all_specs(recipe: Recipe, geometry: Geometry) -> Specs:
    """Every tensor of a fitted recipe under its name in the artifact, `layers.{i}.{key|value}.{stage}.{field}`."""
    return {
        f"layers.{layer}.{half}.{name}": spec
        for layer in range(geometry.layers)
        for half in HALVES
        for name, spec in specs(recipe, layer, half, geometry).items()
    }
