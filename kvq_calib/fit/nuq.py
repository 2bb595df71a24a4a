"""Fit KVQuant's non-uniform codebook: the ends of channels from quantiles, the points by k-means++ of what is inside.

    low, high      of scale "channel": the quantiles (1 - covered) / 2 and (1 + covered) / 2 of each channel
                   of scale "token": each token's own, without its outliers
    points         the centres of all normalized elements in [-1, 1], of all channels together

Source: Hooper et al., 2024 (KVQuant), sections 3.3 and 3.4; k-means++: Arthur and Vassilvitskii, 2007.
Differs: clusters are not weighted by Fisher information.
"""

from torch import Tensor

from kvq_calib.fit import clusters
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.stages.fitted_codebook import Nuq, ends, normalized


def requests(stage: Nuq) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


def solve(stage: Nuq, statistics: Statistics, codec: Codec) -> tuple[Nuq, dict[str, Tensor]]:
    """The points, and the ends of channels where the scale is theirs; without what `correct` sets aside as outliers."""
    rows_NC, correct = statistics[Residuals()], codec.scheme.correct
    rest_NC = rows_NC if correct is None else correct.rest(rows_NC[None])[0]
    if stage.scale == "channel":
        middle, half = channel_ends(rest_NC, stage.covered)
        stored = {"middle": middle, "half": half}
    else:
        middle, half = (end[:, None] for end in ends(rest_NC))
        stored = {}
    u = normalized(rows_NC, middle, half)
    inside = u[u.abs() <= 1 + 1e-6]  # the ends themselves, as they are rounded
    points = clusters.centres(inside.clamp(-1, 1), 2**stage.bits, statistics.seed)
    return stage, {"points": points.float().to(rows_NC.device)} | stored


def channel_ends(rows_NC: Tensor, covered: float) -> tuple[Tensor, Tensor]:
    """Middle and half of the range of each channel that encloses this share of its elements, float32 [C]."""
    rising = rows_NC.sort(0).values
    beyond = int((1 - covered) / 2 * len(rising))  # elements left out at either end
    low, high = rising[beyond], rising[len(rising) - 1 - beyond]
    return (low + high) / 2, (high - low) / 2
