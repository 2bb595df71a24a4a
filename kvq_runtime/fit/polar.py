"""Fit the codebook of each level of a polar transform to the angles of a sample.

    centroids   of the angles of the level, all vectors and places together; pairs of no length have no angle
    boundaries  halfway between neighbours
    points      (cos, sin) of the centroid, or the mean of (cos, sin) over the cell

Level 1 is a circle, but 0 stays a boundary, as in the exact codebook.

Source: Han et al., 2025 (PolarQuant), equation 4, algorithm 1 and section 4.1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import lloyd, polar
from kvq_runtime.stages.polar import PolarFitted

Centres = Callable[[Tensor, int], Tensor]  # (numbers, count) → the rising centres of so many clusters, float64


def requests(stage: PolarFitted) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


def solve(
    stage: PolarFitted, statistics: Statistics, codec: Codec, centres: Centres = lloyd.centres
) -> tuple[PolarFitted, dict[str, Tensor]]:
    """Return the codebooks, on the sample as the quantizer sees it: rotated."""
    return stage, codebooks(stage, codec.rotated(statistics[Residuals()]), codec.geometry, centres)


def codebooks(quantize: PolarFitted, rows_NC: Tensor, geometry: Geometry, centres: Centres) -> dict[str, Tensor]:
    """Return the tensors of the quantizer, from a sample of tokens as it sees them, float32."""
    size, bits = quantize.sizes(rows_NC.shape[-1], geometry)
    x = rows_NC.unflatten(-1, (-1, size)).double()
    boundaries, points = [], []
    for level, width in enumerate(bits, start=1):
        a, b = x[..., 0::2], x[..., 1::2]
        x = torch.hypot(a, b)
        angles = torch.atan2(b, a)[x > 0].remainder(2 * math.pi)
        centroids = _centroids(angles, level, width, centres)
        between = (centroids[1:] + centroids[:-1]) / 2
        boundaries.append(between)
        points.append(_points(angles, between, centroids, quantize.points))
    return {"boundaries": torch.cat(boundaries).float(), "points": torch.cat(points).float()}


def _centroids(angles: Tensor, level: int, bits: int, centres: Centres) -> Tensor:
    if not len(angles):  # of nothing but zeros
        return polar.codebook(level, bits)[1].to(angles.device)
    return centres(angles, 2**bits).to(angles.device)


def _points(angles: Tensor, boundaries: Tensor, centroids: Tensor, kind: polar.Points) -> Tensor:
    circle = torch.stack([centroids.cos(), centroids.sin()], 1)
    if kind == "unit":
        return circle
    cell = torch.bucketize(angles, boundaries)
    count = cell.bincount(minlength=len(centroids))
    sums = torch.zeros_like(circle).index_add_(0, cell, torch.stack([angles.cos(), angles.sin()], 1))
    return torch.where(count[:, None] > 0, sums / count.clamp_min(1)[:, None], circle)
