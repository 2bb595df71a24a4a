"""Fit a basis: the leading eigenvectors of what the prediction leaves, as many as the quantizer stores.

Source: Hong et al., 2025 (SVDq), theorem 4.1.
"""

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import ResidualMoment, Statistics
from kvq_runtime.stages.rotate import Basis


def requests(stage: Basis) -> tuple[ResidualMoment]:
    """Return the statistics that a fit needs."""
    return (ResidualMoment(),)


def solve(stage: Basis, statistics: Statistics, codec: Codec) -> tuple[Basis, dict[str, Tensor]]:
    """Return the basis, bfloat16 [C, R], or by head [H, D, R / H]."""
    heads = codec.geometry.kv_heads if stage.group == "head" else 0
    count = codec.scheme.quantize.stored(codec.geometry.width)
    return stage, leading(statistics.directions(None, heads)[1], count // max(heads, 1))


def leading(matrices: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the first columns of the basis, and of its dual."""
    return {name: matrix_CC[..., :count].to(torch.bfloat16).contiguous() for name, matrix_CC in matrices.items()}
