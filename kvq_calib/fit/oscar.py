"""Fit OSCAR's rotation of every head in the metric of what reads it.

    keys     M = E[q qᵀ] over tokens and query heads that read the KV head, after RoPE
    values   M = Σ_t w_t v_t v_tᵀ / Σ w_t,  w_t = k_tᵀ E[q qᵀ] k_t: what queries see of token t, after RoPE

Source: Zhou et al., 2026 (OSCAR). See `kvq_runtime/stages/oscar.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.chunks import Chunk
from kvq_calib.fit.scheme import Empty, SchemeFit, Source, Summed
from kvq_calib.fit.statistics import Attended
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import QueryMoment, Statistic, Statistics, eigen
from kvq_runtime.stages.oscar import Oscar


@dataclass(frozen=True)
class AttendedMoment(Summed[Tensor]):
    """The second moment of what is left of values, weighed by what queries see in their keys: float64 [H, D, D]."""

    passes = ("capture", "residuals")

    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        assert source.queries is not None, "values are weighed by queries"
        return partial(Attended, source.queries.after)

    def add(self, sums: Attended, chunk: Chunk) -> None:
        sums.update(chunk.keys(), chunk.residual, chunk.data.mask_NT)


def requests(stage: Oscar) -> tuple[Statistic[Any], ...]:
    """Return the statistics that a fit needs."""
    return (QueryMoment("after") if stage.metric == "queries" else AttendedMoment(),)


def solve(stage: Oscar, statistics: Statistics, codec: Codec) -> tuple[Oscar, dict[str, Tensor]]:
    """The rotation, float32 [H, D, D]."""
    queries = stage.metric == "queries"
    metric_HDD = statistics[QueryMoment("after")].moment_HDD.double() if queries else statistics[AttendedMoment()]
    return stage, {"rotation": torch.stack([spectral(metric_DD) for metric_DD in metric_HDD]).float()}


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
