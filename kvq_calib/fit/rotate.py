"""Fit a basis with as many columns as the quantizer's schedule stores, in the metric of what errors cost if asked.

    of values   attention adds up values with weights a_t, and a query head's sum goes through its columns W of the
                output projection; for an error e of one token's value that is ‖Σ a_t e Wᵀ‖², so M = Σ WᵀW over the
                query heads that read the KV head, and nothing between KV heads
    of both     by a gradient basis, Fisher information: M = E[g gᵀ] of the gradients at a token's keys, or values, by
                KV head (`run/gradients.py`)
    of keys     an error e of a token's key changes the score of a query by q e, so M = E[q qᵀ] over the query heads
                that read the KV head, and nothing between KV heads: a query reads one

Directions that no output, or no query, sees would make M singular; a thousandth of its mean on the diagonal keeps the
dual basis finite, of gradients a tenth. M is scaled to a mean of 1 on its diagonal, which changes no choice of bits or
directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_calib.fit.scheme import Given, SchemeFit, Source
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import rotate
from kvq_runtime.fit.fitting import fit_module
from kvq_runtime.fit.statistics import ResidualMoment, Statistic, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.rotate import Basis, GradientBasis, OutputBasis, QueryBasis
from kvq_runtime.stages.stage import Queries, Rotation

RIDGE = 1e-3
PACKAGES = ("kvq_calib.fit",)  # a quantizer that takes latents has a `schedule` there: which are stored
# Of gradients, few of which have most of the squares: at 2 bits, with M of half the text and this ridge, errors cost
# SmolLM2 0.99 (on other sequences) and 0.94 times (on code) as much as with M of all of it and a thousandth.
SMOOTHED = 0.1


@dataclass(frozen=True)
class QueryMetric(Given[Tensor]):
    """The metric of a key's errors in scores, float64 [C, C]."""

    passes = ("capture",)
    queries: Queries = "before"

    def read(self, fit: SchemeFit, source: Source) -> Tensor:
        assert source.queries is not None, "queries are summed while a layer is captured"
        return query_metric(source.queries.moment(self.queries))


@dataclass(frozen=True)
class OutputMetric(Given[Tensor]):
    """The metric of a value's errors in the output of its layer, float64 [C, C]."""

    passes = ()

    def read(self, fit: SchemeFit, source: Source) -> Tensor:
        return output_metric(source.projection(), fit.codec.geometry)


@dataclass(frozen=True)
class GradientMetric(Given[Tensor]):
    """The metric of a key's, or a value's, errors in nats, up to a factor: float64 [C, C]."""

    passes = ("gradients",)

    def read(self, fit: SchemeFit, source: Source) -> Tensor:
        return gradient_metric(source.gradients())


def metric(stage: Rotation | None) -> Statistic[Tensor] | None:
    """The metric of a basis; None: of a plain one."""
    match stage:
        case QueryBasis():
            return QueryMetric(stage.queries)
        case OutputBasis():
            return OutputMetric()
        case GradientBasis():
            return GradientMetric()


def requests(stage: Basis) -> tuple[Statistic[Tensor], ...]:
    """Return the statistics that a fit needs."""
    weighed = metric(stage)
    return (ResidualMoment(),) if weighed is None else (ResidualMoment(), weighed)


def solve(stage: Basis, statistics: Statistics, codec: Codec) -> tuple[Basis, dict[str, Tensor]]:
    """The basis, and its dual if it is weighted: bfloat16 [C, R]."""
    weighed = metric(stage)
    variances_C, matrices = statistics.directions(weighed)
    quantize = codec.scheme.quantize
    count = fit_module(quantize, PACKAGES).schedule(quantize, variances_C).stored(len(variances_C))
    return stage, rotate.leading(matrices, count)


def output_metric(weight_EQ: Tensor, geometry: Geometry) -> Tensor:
    """The metric of values, float64 [C, C], from the weight of `o_proj`, [hidden, query heads · head size]."""
    heads = weight_EQ.double().unflatten(1, (geometry.kv_heads, -1, geometry.head_size))
    blocks_HDD = torch.einsum("ehgd,ehgf->hdf", heads, heads)
    return _metric(blocks_HDD, "the output projection is zero: it says nothing about values; use a plain basis")


def query_metric(moment_HDD: Tensor) -> Tensor:
    """The metric of keys, float64 [C, C], from the second moment of the queries of each KV head."""
    return _metric(moment_HDD, "the queries are zero: they say nothing about keys; use a plain basis")


def gradient_metric(moment_HDD: Tensor) -> Tensor:
    """The metric of keys, or of values, float64 [C, C], from the second moment of their gradients."""
    return _metric(moment_HDD, "the gradients are zero: errors cost nothing here; use a plain basis", SMOOTHED)


def _metric(blocks_HDD: Tensor, refusal: str, ridge: float = RIDGE) -> Tensor:
    metric_CC = torch.block_diag(*blocks_HDD.double())
    mean = metric_CC.diagonal().mean()
    if not mean > 0:
        raise ValueError(refusal)
    return metric_CC / mean + ridge * torch.eye(len(metric_CC), dtype=torch.float64, device=metric_CC.device)
