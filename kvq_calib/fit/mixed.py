"""Choose the bits of latent channels where a recipe names only their sum, by reverse water-filling on their variances.

    minimise Σ λ_r d(b_r)   subject to   Σ b_r = budget,   0 ≤ b_r ≤ most

where λ are the variances and d(b) is what b bits leave of a unit variance. d falls convexly, so giving one bit at a
time to the channel that gains most is optimal (Fox, 1966); with d(b) = 4^-b and fractions of bits it is the textbook's
b_r = max(0, ½ log₂ λ_r / θ). Scales are fitted by `kvq_runtime.fit.mixed`, which a cache that fits to its own prompt
shares.

Source: Cover and Thomas, 2006, section 10.3.3; Shoham and Gersho, 1988 (whole bits).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from kvq_calib.fit.rotate import metric
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import mixed
from kvq_runtime.fit.mixed import requests
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.stages.latent import Mixed

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


def water_fill(variances_R: Tensor, budget: int, distortions: Sequence[float]) -> list[int]:
    """Bits of each channel, in the channels' order. Ties go to the channel that comes first.

    distortions   d(0), d(1), ..., d(most): falling, and by less and less
    """
    most = len(distortions) - 1
    gains = [first - second for first, second in pairwise(distortions)]
    if any(gain <= 0 for gain in gains) or gains != sorted(gains, reverse=True):
        raise ValueError(f"distortions={list(distortions)}; they must fall, by less and less")
    if not 0 <= budget <= most * len(variances_R):
        raise ValueError(f"budget={budget} for {len(variances_R)} channels of at most {most} bits; use less, or 0")
    table_RB = variances_R.cpu().double()[:, None] * torch.tensor(gains, dtype=torch.float64)
    # bit by bit over all channels: on equal gains the lower bit and then the first channel comes first
    order = table_RB.mT.flatten().argsort(descending=True, stable=True)[:budget]
    return (order % len(variances_R)).bincount(minlength=len(variances_R)).tolist()


def counts(bits_R: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    """Count the channels of each of these widths: what a schedule in falling order stores."""
    if any(bits not in widths for bits in bits_R):
        raise ValueError(f"bits {sorted(set(bits_R))}; the schedule has {list(widths)}")
    return tuple(sum(bits == width for bits in bits_R) for width in widths)
