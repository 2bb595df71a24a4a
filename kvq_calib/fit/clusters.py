"""Cluster numbers, or vectors, by k-means++, the same on every run.

One thread: with more, scikit-learn adds up in the order in which threads end.
"""

from typing import Any

import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

SAMPLES = 1 << 16  # numbers that are enough for a few hundred clusters
STARTS = 4


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


def _repeated(distinct: Tensor, count: int) -> Tensor:
    return distinct[torch.arange(count).clamp(max=len(distinct) - 1)]


def _fitted(x_NE: Tensor, count: int, starts: Any, seed: int, weight: Any = None) -> Tensor:
    with threadpool_limits(1):
        means = KMeans(count, n_init=starts, random_state=seed).fit(x_NE.numpy(), sample_weight=weight)
    return torch.from_numpy(means.cluster_centers_)
