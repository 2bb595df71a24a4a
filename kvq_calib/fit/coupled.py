"""Fit CQ's codebooks: the centres that k-means++ finds among a sample of tokens, for each group of coupled channels.

Source: Zhang et al., 2024 (CQ, arXiv 2405.03917), section 3.2 (uniform centroid learning).
Differs: points are not weighted by Fisher information (section 3.3), which needs the gradient at every token of the
sample; the sample has at most 4096 tokens, 16 for each centroid of an 8-bit code.
"""

import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.stages.fitted_codebook import Coupled


def requests(stage: Coupled) -> tuple[Residuals]:
    """Return the statistics that a fit needs."""
    return (Residuals(),)


def solve(stage: Coupled, statistics: Statistics, codec: Codec) -> tuple[Coupled, dict[str, Tensor]]:
    """The centroids, float16 [G, 2^bits, channels], of what is rounded: rotated, and without what `correct` keeps."""
    rows_1NC, correct = statistics[Residuals()][None], codec.scheme.correct
    rest_1NC = rows_1NC if correct is None else correct.rest(rows_1NC)
    x_GNE = codec.rotated(rest_1NC)[0].double().cpu().unflatten(-1, (-1, stage.channels)).transpose(0, 1)
    with threadpool_limits(1):  # with more, sums follow the order in which threads end
        found = [centres(x_NE, 1 << stage.bits, statistics.seed) for x_NE in x_GNE]
    return stage, {"centroids": torch.stack(found).half().to(rows_1NC.device)}


def centres(x_NE: Tensor, count: int, seed: int) -> Tensor:
    """The centres of `count` clusters of vectors; of fewer different vectors, all of them, the last repeated."""
    distinct_ME, times_M = x_NE.unique(dim=0, return_counts=True)
    if len(distinct_ME) <= count:
        return distinct_ME[torch.arange(count).clamp(max=len(distinct_ME) - 1)]
    means = KMeans(count, n_init=1, random_state=seed)  # type: ignore[arg-type]  # its type is inferred from its default
    return torch.from_numpy(means.fit(distinct_ME.numpy(), sample_weight=times_M.double().numpy()).cluster_centers_)
