"""Choose the bits of latent channels where a recipe names only their sum, by reverse water-filling on their variances.

Scales are fitted by `kvq_runtime.fit.mixed`, which a cache that fits to its own prompt shares.
"""

from dataclasses import replace

from torch import Tensor

from kvq_calib.fit.allocate import counts, water_fill
from kvq_calib.fit.rotate import metric
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import mixed
from kvq_runtime.fit.mixed import requests
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.stages.mixed import Mixed

__all__ = ["requests", "schedule", "solve"]


def solve(stage: Mixed, statistics: Statistics, codec: Codec) -> tuple[Mixed, dict[str, Tensor]]:
    """The quantizer with the bits of its channels, and its scales."""
    variances_C, _ = statistics.directions(metric(codec.scheme.rotate))
    return mixed.solve(schedule(stage, variances_C), statistics, codec)


def schedule(stage: Mixed, variances_C: Tensor) -> Mixed:
    """The stage with the channels of each run filled in, where it has a target."""
    if not stage.target:
        return stage
    bits_C = water_fill(variances_C, stage.budget(len(variances_C)), stage.distortions())
    return replace(stage, counts=counts(bits_C, stage.bits))
