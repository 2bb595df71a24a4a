"""Fit a codec to one row of tokens: mean, basis and ranges, angles, and feedback from the row's own queries.

Calibration shares this arithmetic; the statistics here are of one row, taken at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.fitting import Fitting
from kvq_runtime.fit.statistics import Row, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Role
from kvq_runtime.stages.stage import Queries


def fit(
    recipe: Recipe,
    layer: int,
    role: Role,
    geometry: Geometry,
    x_NC: Tensor,
    queries: Callable[[Queries], Tensor] | None = None,
) -> Codec:
    """The codec of one scheme of one layer, fitted to these tokens of one row.

    x_NC      keys in the recipe's position, or values, float32; at least one
    queries   as of a `Row`
    """
    fitting = Fitting(recipe, layer, role, geometry, Statistics(x_NC.mean(0, dtype=torch.float64).float()))

    def collect(asked):
        row = Row(fitting.codec, x_NC, queries)
        return {one: one.of_row(row) for one in asked}

    fitting.solve(collect)
    return fitting.codec
