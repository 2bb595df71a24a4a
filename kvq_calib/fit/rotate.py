"""Fit a basis with as many columns as the quantizer's schedule stores, in the metric of gradients if asked.

    M = E[g gᵀ], g the gradient at a token's keys, or values, by KV head (`run/gradients.py`)

Directions that no gradient has would make M singular; a tenth of its mean on the diagonal keeps the dual basis finite.
M is scaled to a mean of 1 on its diagonal, which changes no choice of bits or directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_calib.fit.scheme import Given, SchemeFit, Source
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import rotate
from kvq_runtime.fit.fitting import fit_module
from kvq_runtime.fit.statistics import ResidualMoment, Statistic, Statistics
from kvq_runtime.stages.rotate import Basis, GradientBasis
from kvq_runtime.stages.stage import Rotation

PACKAGES = ("kvq_calib.fit",)  # a quantizer that takes latents has a `schedule` there: which are stored
# Few gradients have most of the squares: at 2 bits, with M of half the text and this ridge, errors cost SmolLM2 0.99
# (on other sequences) and 0.94 times (on code) as much as with M of all of it and a thousandth.
RIDGE = 0.1


@dataclass(frozen=True)
class GradientMetric(Given[Tensor]):
    """The metric of a key's, or a value's, errors in nats, up to a factor: float64 [C, C]."""

    passes = ("gradients",)

    def read(self, fit: SchemeFit, source: Source) -> Tensor:
        return gradient_metric(source.gradients())


def metric(stage: Rotation | None) -> Statistic[Tensor] | None:
    """Return the metric of a basis; None for a plain one."""
    return GradientMetric() if isinstance(stage, GradientBasis) else None


def requests(stage: Basis) -> tuple[Statistic[Tensor], ...]:
    """Return the statistics that a fit needs."""
    weighed = metric(stage)
    return (ResidualMoment(),) if weighed is None else (ResidualMoment(), weighed)


def solve(stage: Basis, statistics: Statistics, codec: Codec) -> tuple[Basis, dict[str, Tensor]]:
    """Return the basis, and with a metric its dual: bfloat16 [C, R]."""
    variances_C, matrices = statistics.directions(metric(stage))
    quantize = codec.scheme.quantize
    count = fit_module(quantize, PACKAGES).schedule(quantize, variances_C).stored(len(variances_C))
    return stage, rotate.leading(matrices, count)


def gradient_metric(moment_HDD: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return the metric, float64 [C, C], from the second moment of the gradients of each KV head."""
    metric_CC = torch.block_diag(*moment_HDD.double())
    mean = metric_CC.diagonal().mean()
    if not mean > 0:
        raise ValueError("the gradients are zero: errors cost nothing here; use a plain basis")
    return metric_CC / mean + ridge * torch.eye(len(metric_CC), dtype=torch.float64, device=metric_CC.device)
