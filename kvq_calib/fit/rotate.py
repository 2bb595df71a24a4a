"""Fit a basis with as many columns as the quantizer's schedule stores, in the metric of the layer's output if asked.

    metric M    attention adds up values with weights a_t, and a query head's sum goes through its columns W of the
                output projection; for an error e of one token's value that is ‖Σ a_t e Wᵀ‖², so M = Σ WᵀW over the
                query heads that read the KV head, and nothing between KV heads

Directions that no output sees would make M singular; a thousandth of its mean on the diagonal keeps the dual basis
finite. M is scaled to a mean of 1 on its diagonal, which changes no choice of bits or directions.
"""

import torch
from torch import Tensor

from kvq_calib.fit.mixed import schedule
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import rotate
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.rotate import Basis, OutputBasis

RIDGE = 1e-3


def statistics(stage: Basis) -> tuple[str, ...]:
    """What a fit needs."""
    return ("metric", "residuals") if isinstance(stage, OutputBasis) else ("residuals",)


def solve(stage: Basis, statistics: Statistics, codec: Codec) -> tuple[Basis, dict[str, Tensor]]:
    """The basis, and the dual of an output basis: bfloat16 [C, R]."""
    variances_C, _ = statistics.directions
    return stage, rotate.leading(statistics, schedule(codec.scheme.quantize, variances_C).stored(len(variances_C)))


def metric(weight_EQ: Tensor, geometry: Geometry) -> Tensor:
    """The metric of values, float64 [C, C], from the weight of `o_proj`, [hidden, query heads · head size]."""
    heads = weight_EQ.double().unflatten(1, (geometry.kv_heads, -1, geometry.head_size))
    blocks_HDD = torch.einsum("ehgd,ehgf->hdf", heads, heads)
    metric_CC = torch.block_diag(*blocks_HDD)
    mean = metric_CC.diagonal().mean()
    if not mean > 0:
        raise ValueError("the output projection is zero: it says nothing about values; use a plain basis")
    return metric_CC / mean + RIDGE * torch.eye(len(metric_CC), dtype=torch.float64, device=metric_CC.device)
