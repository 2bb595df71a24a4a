"""Fit the codebooks that many tokens share: by k-means++.

    coupled   the centres of a sample of tokens, for each group of coupled channels; or, as long as what they stand
              for, by gain-shape k-means
    nuq       ends    of scale "channel": the quantiles (1 - covered) / 2 and (1 + covered) / 2 of each channel
                      of scale "token": each token's own, without its outliers
              points  the centres of all normalized elements in [-1, 1], of all channels together

Clusters are the same on every run, by one thread: with more, scikit-learn adds up in the order in which threads end.

Source: Zhang et al., 2024 (CQ, arXiv 2405.03917), section 3.2 (uniform centroid learning); Hooper et al., 2024
(KVQuant), sections 3.3 and 3.4; k-means++: Arthur and Vassilvitskii, 2007.
Differs: neither weighs clusters by Fisher information, which CQ's section 3.3 needs the gradient at every token of the
sample for; CQ's sample has at most 4096 tokens, 16 for each centroid of an 8-bit code. Gain-shape k-means is written
after the abstract of Kim et al., 2026 (GSRQ, arXiv 2607.01065), without their weights and residual codebooks.
"""

from functools import singledispatch
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.stages.fitted_codebook import Coupled, Nuq, ends, normalized

SAMPLES = 1 << 16  # numbers that are enough for a few hundred clusters
STARTS = 4
Kind = Coupled | Nuq
Tensors = dict[str, Tensor]


def requests(stage: Kind) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


@singledispatch
def solve(stage: Kind, statistics: Statistics, codec: Codec) -> tuple[Kind, Tensors]:
    """Return the stage and its codebooks, of what is left without what `correct` sets aside."""
    raise TypeError(f"{stage.kind} is fitted elsewhere")


@solve.register
def _(stage: Coupled, statistics: Statistics, codec: Codec) -> tuple[Coupled, Tensors]:
    rest_NC = _rest(statistics, codec)
    x_GNE = codec.rotated(rest_NC[None])[0].double().cpu().unflatten(-1, (-1, stage.channels)).transpose(0, 1)
    found = [centres_of_vectors(x_NE, 1 << stage.bits, statistics.seed) for x_NE in x_GNE]
    if stage.means == "gain-shape":
        found = [gain_shape(x_NE, points_KE) for x_NE, points_KE in zip(x_GNE, found, strict=True)]
    return stage, {"centroids": torch.stack(found).half().to(rest_NC.device)}


@solve.register
def _(stage: Nuq, statistics: Statistics, codec: Codec) -> tuple[Nuq, Tensors]:
    rows_NC, rest_NC, stored = statistics[Residuals()], _rest(statistics, codec), {}
    if stage.scale == "channel":
        middle, half = channel_ends(rest_NC, stage.covered)
        stored = {"middle": middle, "half": half}
    else:
        middle, half = (end[:, None] for end in ends(rest_NC))
    u = normalized(rows_NC, middle, half)
    inside = u[u.abs() <= 1 + 1e-6]  # the ends themselves, as they are rounded
    points = centres(inside.clamp(-1, 1), 2**stage.bits, statistics.seed)
    return stage, {"points": points.float().to(rows_NC.device)} | stored


def _rest(statistics: Statistics, codec: Codec) -> Tensor:
    rows_NC, correct = statistics[Residuals()], codec.scheme.correct
    return rows_NC if correct is None else correct.rest(rows_NC[None])[0]


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
        return _repeated(distinct, count)
    return _fitted(x_N[:, None], count, STARTS, seed)[:, 0].sort().values


def centres_of_vectors(x_NE: Tensor, count: int, seed: int) -> Tensor:
    """The centres of `count` clusters; of fewer different vectors, all of them, the last repeated."""
    distinct_ME, times_M = x_NE.unique(dim=0, return_counts=True)
    if len(distinct_ME) <= count:
        return _repeated(distinct_ME, count)
    return _fitted(distinct_ME, count, 1, seed, times_M.double().numpy())


def gain_shape(x_NE: Tensor, points_KE: Tensor, rounds: int = 50) -> Tensor:
    """Move centres until each has the mean length of the vectors nearest to it, along the mean of their directions.

    A mean is shorter than what it is the mean of, the more so the more dimensions: scores that are computed with it
    are all pulled to zero. A centre that no vector is nearest to stays.
    """
    length_N1 = x_NE.norm(dim=-1, keepdim=True)
    direction_NE = x_NE / length_N1.clamp_min(1e-12)
    nearest_N = torch.full((len(x_NE),), -1)
    for _ in range(rounds):
        before_N, nearest_N = nearest_N, torch.cdist(x_NE, points_KE).argmin(1)
        if torch.equal(before_N, nearest_N):
            break
        shape_KE = torch.zeros_like(points_KE).index_add_(0, nearest_N, direction_NE)
        gain_K1 = torch.zeros_like(points_KE[:, :1]).index_add_(0, nearest_N, length_N1)
        count_K1 = nearest_N.bincount(minlength=len(points_KE))[:, None]
        moved_KE = shape_KE / shape_KE.norm(dim=-1, keepdim=True).clamp_min(1e-12) * gain_K1 / count_K1.clamp_min(1)
        points_KE = torch.where(count_K1 > 0, moved_KE, points_KE)
    return points_KE


def _repeated(distinct: Tensor, count: int) -> Tensor:
    return distinct[torch.arange(count).clamp(max=len(distinct) - 1)]


def _fitted(x_NE: Tensor, count: int, starts: Any, seed: int, weight: Any = None) -> Tensor:
    from sklearn.cluster import KMeans  # for those alone who cluster: it takes a second

    with threadpool_limits(1):
        means = KMeans(count, n_init=starts, random_state=seed).fit(x_NE.numpy(), sample_weight=weight)
    return torch.from_numpy(means.cluster_centers_)
