"""Fit a codec to one row of tokens: mean, basis and ranges, angles, and feedback from the row's own queries.

Offline and online fits share their arithmetic; the sums here are of one row, taken at once.
"""

from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec import Codec, Context
from kvq_runtime.fit import angles, basis, query
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import lloyd
from kvq_runtime.recipe import Half, Recipe
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.polar import PolarFitted

SAMPLE_ROWS = 4096  # tokens that ranges and codebooks are fitted on, evenly spread


def fit(recipe: Recipe, layer: int, half: Half, geometry: Geometry, x_NC: Tensor, q_NC: Tensor | None = None) -> Codec:
    """The codec of one side of one layer, fitted to these tokens of one row.

    x_NC   keys in the recipe's position, or values, float32; at least one
    q_NC   where the side has feedback: all heads' queries, before or after RoPE as it says
    """
    side, tensors = recipe.side(layer, half), {}
    quantize: Any = side.quantize

    def made() -> Codec:
        return Codec(recipe, layer, half, geometry, tensors).to(x_NC.device)

    if side.predict is not None:
        tensors["predict.mean"] = x_NC.mean(0, dtype=torch.float64).float()
    rows_NC = made().residual(x_NC[None], Context())[0]
    places = torch.arange(SAMPLE_ROWS, device=x_NC.device) * len(rows_NC) // SAMPLE_ROWS
    sample_NC = rows_NC if len(rows_NC) <= SAMPLE_ROWS else rows_NC[places]
    if isinstance(quantize, Mixed):
        moment_CC = rows_NC.double().mT @ rows_NC.double() / len(rows_NC)
        tensors |= basis.tensors(quantize, moment_CC, sample_NC, basis.directions(moment_CC)[1])
    if isinstance(quantize, PolarFitted):
        found = angles.fit(quantize, made().rotated(sample_NC), geometry, lloyd.centres)
        tensors |= {f"quantize.{name}": tensor for name, tensor in found.items()}
    if side.feedback is not None:
        assert q_NC is not None, "feedback is fitted to queries"
        sequence = q_NC.numel() / geometry.width
        turn = side.feedback.turn(side.axis, side.rotate, geometry)
        tensors |= query.fit(side.feedback, moment(q_NC, geometry), sequence, turn)
    return made()


def moment(q_NC: Tensor, geometry: Geometry) -> Tensor:
    """E[q qᵀ] over the tokens and query heads of each KV head, float64 [H, D, D]."""
    shape = (geometry.kv_heads, geometry.head_size, geometry.head_size)
    total_HDD = torch.zeros(shape, dtype=torch.float64, device=q_NC.device)
    query.add(total_HDD, q_NC[None].unflatten(-1, (-1, geometry.head_size)))
    return total_HDD * geometry.width / q_NC.numel()
