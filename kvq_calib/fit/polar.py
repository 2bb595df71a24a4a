"""Fit a polar transform's codebooks to the calibration's angles, by k-means++.

Boundaries and points are those of `kvq_runtime.fit.polar`, which a cache that fits to its own prompt shares.

Source: Han et al., 2025 (PolarQuant), section 4.1 (offline).
"""

from torch import Tensor

from kvq_calib.fit.nuq import centres
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import polar
from kvq_runtime.fit.polar import requests
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.stages.polar import PolarFitted

__all__ = ["requests", "solve"]


def solve(stage: PolarFitted, statistics: Statistics, codec: Codec) -> tuple[PolarFitted, dict[str, Tensor]]:
    """Return the codebooks of every level."""
    return polar.solve(stage, statistics, codec, lambda x_N, count: centres(x_N, count, statistics.seed))
