"""Cluster numbers by k-means++ in one dimension, the same on every run.

One thread: with more, scikit-learn adds up in the order in which threads end.
"""

from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor, arange

SAMPLES = 1 << 16  # numbers that are enough for a few hundred clusters
STARTS = 4


def centres(x_N: Tensor, count: int, seed: int) -> Tensor:
    """The rising centres of `count` clusters, float64; of fewer different numbers, all of them, the last repeated."""
    x_N = x_N.double().flatten().cpu()
    if len(x_N) > SAMPLES:  # evenly spread over the rows, which a sample has in the order of their hashes
        x_N = x_N[arange(SAMPLES) * len(x_N) // SAMPLES]
    distinct = x_N.unique()
    if not len(distinct):
        raise ValueError("no numbers to cluster; use more samples")
    if len(distinct) <= count:
        return distinct[arange(count).clamp(max=len(distinct) - 1)]
    with threadpool_limits(1):
        means = KMeans(count, n_init=STARTS, random_state=seed)  # type: ignore[arg-type]  # its type is inferred from its default
        found = means.fit(x_N[:, None].numpy())
    return x_N.new_tensor(sorted(found.cluster_centers_[:, 0].tolist()))
