"""Fit basis, schedule and scales to what a prediction leaves: the runtime's arithmetic, with bits where none are given.

    bits b_r     the recipe's, or by reverse water-filling on the latent variances
    bound        of the escape: `limit` times the mean squared error of the sample's tokens (see `layer.py`)

The rest is `kvq_runtime.fit.basis`, which a cache that fits to its own prompt shares.
"""

from dataclasses import replace

from torch import Tensor

from kvq_calib.fit.allocate import counts, water_fill
from kvq_runtime.fit import basis
from kvq_runtime.ops import latent
from kvq_runtime.stages.mixed import Mixed


def fit(
    quantize: Mixed, moment_CC: Tensor, rows_NC: Tensor, metric_CC: Tensor | None = None
) -> tuple[Mixed, dict[str, Tensor]]:
    """The quantizer with its bits, and the tensors of basis and quantizer, named by stage.

    moment_CC   second moment of what the prediction leaves, float64
    rows_NC     a sample of it, float32
    metric_CC   what an error costs, where the basis has a dual: symmetric, positive definite
    """
    values_C, found = basis.directions(moment_CC, metric_CC)
    quantize = schedule(quantize, values_C)
    return quantize, basis.tensors(quantize, moment_CC, rows_NC, found)


def schedule(quantize: Mixed, values_C: Tensor) -> Mixed:
    """The stage with the channels of each run filled in, where it has a target."""
    if not quantize.target:
        return quantize
    distortions = [latent.distortion(bits) for bits in range(quantize.bits[0] + 1)]
    bits_C = water_fill(values_C, quantize.budget(len(values_C)), distortions)
    return replace(quantize, counts=counts(bits_C, quantize.bits))
