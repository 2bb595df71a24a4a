"""Fit the bound beyond which a token escapes: `limit` times the mean squared error of the sample's tokens."""

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.stages.correct import Escape

BLOCK = 8  # tokens: a quantizer may take no other number than a multiple of this


def requests(stage: Escape) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


def solve(stage: Escape, statistics: Statistics, codec: Codec) -> tuple[Escape, dict[str, Tensor]]:
    """The bound, float32 [1]."""
    rows_NC = statistics[Residuals()]
    rows_1NC = torch.cat([rows_NC, rows_NC[-1:].expand(-len(rows_NC) % BLOCK, -1)])[None]  # the last one repeated
    error_1N = (codec.rounded(rows_1NC) - rows_1NC).square().sum(-1)
    return stage, {"bound": (stage.limit * error_1N.double().mean()).float()[None]}
