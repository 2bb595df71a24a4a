"""Fit a basis with as many columns as the quantizer's schedule stores, or OSCAR's rotation of every head.

    gradient basis   M = E[g gᵀ], g the gradient at a token's keys, or values, by KV head (`run/gradients.py`)
    OSCAR's keys     M = E[q qᵀ] over tokens and query heads that read the KV head, after RoPE
    OSCAR's values   M = Σ_t w_t v_t v_tᵀ / Σ w_t,  w_t = k_tᵀ E[q qᵀ] k_t: what queries see of token t, after RoPE

Directions that no gradient has would make M singular; a tenth of its mean on the diagonal keeps the dual basis finite.
M is scaled to a mean of 1 on its diagonal, which changes no choice of bits or directions.

Source: of OSCAR, Zhou et al., 2026.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.chunks import Chunk
from kvq_calib.fit.scheme import Empty, Given, LayerSource, SchemeFit, Summed
from kvq_calib.fit.statistics import Attended
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import rotate
from kvq_runtime.fit.fitting import fit_module
from kvq_runtime.fit.statistics import QueryMoment, ResidualMoment, Statistic, Statistics, eigen
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.rotate import Basis, GradientBasis, Oscar
from kvq_runtime.stages.stage import Rotation, Scheme

PACKAGES = ("kvq_calib.fit",)  # a quantizer that takes latents has a `schedule` there: which are stored
# Few gradients have most of the squares: at 2 bits, with M of half the text and this ridge, errors cost SmolLM2 0.99
# (on other sequences) and 0.94 times (on code) as much as with M of all of it and a thousandth.
RIDGE = 0.1


@dataclass(frozen=True)
class GradientMetric(Given[Tensor]):
    """The metric of a key's, or a value's, errors in nats, up to a factor: float64 [C, C]."""

    passes = ("gradients",)

    def read(self, fit: SchemeFit, source: LayerSource) -> Tensor:
        return gradient_metric(source.gradients())


@dataclass(frozen=True)
class AttendedMoment(Summed[Tensor]):
    """The second moment of what is left of values, weighed by what queries see in their keys: float64 [H, D, D]."""

    passes = ("capture", "residuals")

    def empty(self, fit: SchemeFit, source: LayerSource) -> Empty:
        assert source.queries is not None, "values are weighed by queries"
        return partial(Attended, source.queries.after)

    def add(self, sums: Attended, chunk: Chunk) -> None:
        sums.update(chunk.keys(), chunk.residual, chunk.data.mask_NT)


def metric(stage: Rotation | None) -> Statistic[Any] | None:
    """Return the statistic in whose metric errors are measured; None for a plain basis."""
    match stage:
        case GradientBasis():
            return GradientMetric()
        case Oscar(metric="queries"):
            return QueryMoment("after")
        case Oscar():
            return AttendedMoment()


def requests(stage: Basis | Oscar) -> tuple[Statistic[Any], ...]:
    """Return the statistics that a fit needs."""
    moment = () if isinstance(stage, Oscar) else (ResidualMoment(),)
    weighed = metric(stage)
    return moment if weighed is None else (*moment, weighed)


def solve(stage: Basis | Oscar, statistics: Statistics, codec: Codec) -> tuple[Basis | Oscar, dict[str, Tensor]]:
    """Return the basis, and with a metric its dual, bfloat16 [C, R]; or OSCAR's rotations, float32 [H, D, D]."""
    weighed = metric(stage)
    if isinstance(stage, Oscar):
        assert weighed is not None
        measured: Any = statistics[weighed]
        metric_HDD = measured.moment_HDD.double() if isinstance(weighed, QueryMoment) else measured
        return stage, {"rotation": torch.stack([spectral(metric_DD) for metric_DD in metric_HDD]).float()}
    variances_C, matrices = directions(codec.scheme, statistics, codec.geometry)
    quantize, heads = codec.scheme.quantize, codec.geometry.kv_heads
    count = fit_module(quantize, PACKAGES).schedule(codec.scheme, variances_C, codec.geometry).stored(len(variances_C))
    return stage, rotate.leading(matrices, count // heads if stage.group == "head" else count)


def directions(scheme: Scheme, statistics: Statistics, geometry: Geometry) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the latent variances of a scheme and the matrices of its basis, of `Statistics.directions`."""
    by_head = isinstance(scheme.rotate, Basis) and scheme.rotate.group == "head"
    return statistics.directions(metric(scheme.rotate), geometry.kv_heads if by_head else 0)


def gradient_metric(moment_HDD: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return the metric, float64 [C, C], from the second moment of the gradients of each KV head."""
    metric_CC = torch.block_diag(*moment_HDD.double())
    mean = metric_CC.diagonal().mean()
    if not mean > 0:
        raise ValueError("the gradients are zero: errors cost nothing here; use a plain basis")
    return metric_CC / mean + ridge * torch.eye(len(metric_CC), dtype=torch.float64, device=metric_CC.device)


def spectral(metric_DD: Tensor) -> Tensor:
    """U H P: eigenvectors, mixed, in the bit-reversal order of their eigenvalues; float64, orthogonal."""
    values_D, vectors_DD = eigen(metric_DD)
    values_D, vectors_DD = values_D.flip(0), vectors_DD.flip(1)  # ascending, as the authors' H meets them
    return (vectors_DD @ mixing(len(metric_DD)).to(vectors_DD))[:, bit_reversal(values_D)]


def mixing(size: int) -> Tensor:
    """A Hadamard matrix without signs, float64 [size, size]; where size is s · r, s the largest power of two, over s
    directions that are r apart."""
    power = size & -size
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) < power:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    return torch.kron(sylvester, torch.eye(size // power, dtype=torch.float64)) / power**0.5


def bit_reversal(values_D: Tensor) -> Tensor:
    """Return the order of columns: the i-th largest eigenvalue's goes to i with its bits reversed.

    The order is unchanged if the size is no power of two.
    """
    size = len(values_D)
    order = torch.arange(size, device=values_D.device)
    if size & (size - 1) or size == 1:
        return order
    bits = size.bit_length() - 1
    places = sum(((order >> bit) & 1) << (bits - 1 - bit) for bit in range(bits))
    order[places] = values_D.argsort(descending=True, stable=True)
    return order
