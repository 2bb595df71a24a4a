"""Fit CQ's codebooks: the centres that k-means++ finds among a sample of tokens, for each group of coupled channels.

Source: Zhang et al., 2024 (CQ, arXiv 2405.03917), section 3.2 (uniform centroid learning).
Differs: points are not weighted by Fisher information (section 3.3), which needs the gradient at every token of the
sample; the sample has at most 4096 tokens, 16 for each centroid of an 8-bit code.
"""

import torch
from torch import Tensor

from kvq_calib.fit.clusters import centres_of_vectors
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
    found = [centres_of_vectors(x_NE, 1 << stage.bits, statistics.seed) for x_NE in x_GNE]
    return stage, {"centroids": torch.stack(found).half().to(rows_1NC.device)}
