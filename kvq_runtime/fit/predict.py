"""Fit the mean that a prediction removes: all of it that one row of tokens is enough for."""

from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.stages.stage import Predictor


def requests(stage: Predictor) -> tuple[()]:
    """Return the statistics that a fit needs, beside the mean."""
    return ()


def solve(stage: Predictor, statistics: Statistics, codec: Codec) -> tuple[Predictor, dict[str, Tensor]]:
    """The mean, float32 [C]; of keys before RoPE."""
    return stage, {"mean": statistics.mean_C}
