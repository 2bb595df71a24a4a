"""Fit a codec to one row of tokens: mean, basis and ranges, angles, and feedback from the row's own queries.

Calibration shares this arithmetic; the sums here are of one row, taken at once.
"""

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.fit import moments
from kvq_runtime.fit.fitting import Fitting
from kvq_runtime.fit.statistics import Queries, Residuals, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Role

SAMPLE_ROWS = 4096  # tokens that ranges and codebooks are fitted on, evenly spread


def fit(recipe: Recipe, layer: int, role: Role, geometry: Geometry, x_NC: Tensor, q_NC: Tensor | None = None) -> Codec:
    """The codec of one scheme of one layer, fitted to these tokens of one row.

    x_NC   keys in the recipe's position, or values, float32; at least one
    q_NC   if the scheme has feedback: all heads' queries, before or after RoPE as its setting
    """
    fitting = Fitting(recipe, layer, role, geometry, Statistics(x_NC.mean(0, dtype=torch.float64).float()))

    def collect(field: str) -> Residuals | Queries:
        if field == "residuals":
            return residuals(fitting.codec.residual(x_NC[None], Context())[0])
        feedback = fitting.scheme.feedback
        assert feedback is not None and q_NC is not None, "feedback is fitted to queries"
        moment_HDD, after = moments.of(q_NC, geometry), feedback.queries == "after"
        sequence = q_NC.numel() / geometry.width
        return Queries(None if after else moment_HDD, moment_HDD if after else None, sequence)

    fitting.solve(collect)
    return fitting.codec


def residuals(rows_NC: Tensor) -> Residuals:
    """The second moment of these rows, and a sample of them."""
    places = torch.arange(SAMPLE_ROWS, device=rows_NC.device) * len(rows_NC) // SAMPLE_ROWS
    sample_NC = rows_NC if len(rows_NC) <= SAMPLE_ROWS else rows_NC[places]
    return Residuals(rows_NC.double().mT @ rows_NC.double() / len(rows_NC), sample_NC)
