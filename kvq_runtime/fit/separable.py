"""Fit the scale of every channel: the square root of the largest magnitude in a sample of tokens.

    c_i = √max_t |x_ti|        but at least a thousandth of the largest: a channel that was silent must not be
                               divided by 0, nor rule the range of a token in which it is not

Source: He et al., 2024 (ZipCache), channel-separable tokenwise quantization.
Differs: the sample is of the calibration, at most 4096 tokens, or of a row's first tokens; the lower bound is ours.
"""

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.stages.separable import Separable

QUIETEST = 2.0**-10  # of the largest scale: a magnitude of 2⁻²⁰ of the largest


def requests(stage: Separable) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


def solve(stage: Separable, statistics: Statistics, codec: Codec) -> tuple[Separable, dict[str, Tensor]]:
    """The scales, float32 [C], of what is rounded: rotated, and without what `correct` keeps from the quantizer."""
    rows_1NC, correct = statistics[Residuals()][None], codec.scheme.correct
    rest_1NC = rows_1NC if correct is None else correct.rest(rows_1NC)
    return stage, {"scale": channel_scales(codec.rotated(rest_1NC)[0])}


def channel_scales(x_NC: Tensor) -> Tensor:
    """√max |x| of each channel, float32 [C]; 1 where all channels are silent."""
    scale_C = x_NC.float().abs().amax(0).sqrt()
    loudest = scale_C.max()
    return scale_C.clamp_min(loudest * QUIETEST) if loudest > 0 else torch.ones_like(scale_C)
