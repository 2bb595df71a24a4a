"""Fit KVQuant's non-uniform codebook: the ends of channels from quantiles, the points by k-means++ of what lies inside.

    low, high      of scale "channel": the quantiles (1 - covered) / 2 and (1 + covered) / 2 of each channel
                   of scale "token": each token's own, without its outliers
    points         the centres of all normalized elements in [-1, 1], of all channels together

Source: Hooper et al., 2024 (KVQuant), sections 3.3 and 3.4; k-means++: Arthur and Vassilvitskii, 2007.
Differs: clusters are not weighted by Fisher information.
"""

from torch import Tensor

from kvq_calib.fit import clusters
from kvq_runtime.stages.nuq import Nuq, ends, normalized


def fit(quantize: Nuq, rows_NC: Tensor, rest_NC: Tensor, seed: int) -> dict[str, Tensor]:
    """The tensors of the quantizer.

    rows_NC   a sample of tokens, float32
    rest_NC   the same without the outliers that `correct` sets aside, as the quantizer sees it
    """
    if quantize.scale == "channel":
        middle, half = channel_ends(rest_NC, quantize.covered)
        found = {"middle": middle, "half": half}
    else:
        middle, half = (end[:, None] for end in ends(rest_NC))
        found = {}
    u = normalized(rows_NC, middle, half)
    inside = u[u.abs() <= 1 + 1e-6]  # the ends themselves, as they are rounded
    points = clusters.centres(inside.clamp(-1, 1), 2**quantize.bits, seed)
    return {"points": points.float().to(rows_NC.device)} | found


def channel_ends(rows_NC: Tensor, covered: float) -> tuple[Tensor, Tensor]:
    """Middle and half of the range of each channel that encloses this share of its elements, float32 [C]."""
    rising = rows_NC.sort(0).values
    beyond = int((1 - covered) / 2 * len(rising))  # elements left out at either end
    low, high = rising[beyond], rising[len(rising) - 1 - beyond]
    return (low + high) / 2, (high - low) / 2
