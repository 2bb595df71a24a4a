"""Fit the points and ends of KVQuant's quantizer.

    ends     of scale "channel": the quantiles (1 - covered) / 2 and (1 + covered) / 2 of each channel
             of scale "token": each token's own, without its outliers
    points   the centres of all normalized elements in [-1, 1], of all channels together, by k-means++

Clusters are the same on every run, by one thread: with more, scikit-learn adds up in the order in which threads end.

Source: Hooper et al., 2024 (KVQuant), sections 3.3 and 3.4; k-means++: Arthur and Vassilvitskii, 2007.
Differs: clusters are not weighed by Fisher information.
"""

from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.stages.nuq import Nuq, ends, normalized

SAMPLES = 1 << 16  # numbers that are enough for a few hundred clusters
STARTS: Any = 4


def requests(stage: Nuq) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


def solve(stage: Nuq, statistics: Statistics, codec: Codec) -> tuple[Nuq, dict[str, Tensor]]:
    """Return the stage and its tensors, fitted to the rows without the outliers that `correct` stores."""
    rows_NC, correct = statistics[Residuals()], codec.scheme.correct
    rest_NC = rows_NC if correct is None else correct.rest(rows_NC[None])[0]
    stored = {}
    if stage.scale == "channel":
        middle, half = channel_ends(rest_NC, stage.covered)
        stored = {"middle": middle, "half": half}
    else:
        middle, half = (end[:, None] for end in ends(rest_NC))
    u = normalized(rows_NC, middle, half)
    inside = u[u.abs() <= 1 + 1e-6]  # the ends themselves, as they are rounded
    points = centres(inside.clamp(-1, 1), 2**stage.bits, statistics.seed)
    return stage, {"points": points.float().to(rows_NC.device)} | stored


def channel_ends(rows_NC: Tensor, covered: float) -> tuple[Tensor, Tensor]:
    """Middle and half of the range of each channel that encloses this share of its elements, float32 [C]."""
    rising = rows_NC.sort(0).values
    beyond = int((1 - covered) / 2 * len(rising))  # elements left out at either end
    low, high = rising[beyond], rising[len(rising) - 1 - beyond]
    return (low + high) / 2, (high - low) / 2


def centres(x_N: Tensor, count: int, seed: int) -> Tensor:
    """The rising centres of `count` clusters, float64; of fewer different numbers, all of them, the last repeated."""
    x_N = x_N.double().flatten().cpu()
    if len(x_N) > SAMPLES:  # evenly spread over the rows, which a sample has in the order of their hashes
        x_N = x_N[torch.arange(SAMPLES) * len(x_N) // SAMPLES]
    distinct = x_N.unique()
    if not len(distinct):
        raise ValueError("no numbers to cluster; use more samples")
    if len(distinct) <= count:
        return distinct[torch.arange(count).clamp(max=len(distinct) - 1)]
    from sklearn.cluster import KMeans  # a second's import, for the fits that cluster alone

    with threadpool_limits(1):
        means = KMeans(count, n_init=STARTS, random_state=seed).fit(x_N[:, None].numpy())
    return torch.from_numpy(means.cluster_centers_)[:, 0].sort().values
