"""The statistics that stages are fitted to: of a calibration's chunks, or of one row of a cache.

A stage's fit module requests them (`requests`) as objects that say what they are: frozen dataclasses, of which equal
ones are collected once, whoever asks. Here are those that a row has, too; `kvq_calib/fit/scheme.py` has the others.

Second moments of queries:

    before      E[q₀ q₀ᵀ]                         q₀ as the projection puts it out
    after       E[q qᵀ], q = R_n q₀               as attention uses it

An error e of a key before RoPE, δ tokens before the query, is multiplied as (R_n q₀)ᵀ (R_n-δ e) = (R_δ q₀)ᵀ e.
Attention looks at what is near, where RoPE turns little: there, it is q₀ᵀ e.

The directions of a latent basis are the eigenvectors of a second moment, by falling eigenvalue, with fixed signs:

    S = E[r rᵀ] = V diag(λ) Vᵀ          the basis is V, the latent variances are λ

With a metric M the error that counts is e M eᵀ: S becomes M^½ S M^½, the basis M^½ V, and its dual M^-½ V decodes. S is
about zero, not about a mean: no stage after the prediction removes one.

Source: Hong et al., 2025 (SVDq), theorem 4.1.
Differs: eigenvectors of the moment, in float64, with a fixed sign, for the right singular vectors of the data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.stage import Queries

TILE = 1024  # rows of one float32 product, whose error grows with them; products are added in float64
SAMPLE_ROWS = 4096  # tokens that an iterative fit sees, unless it asks for others

V = TypeVar("V", covariant=True)


@dataclass(frozen=True)
class Row:
    """The tokens of one row.

    codec     of what is fitted so far
    x_NC      keys in the recipe's position, or values, float32
    queries   → all heads' queries [N, query heads · D], "before" or "after" RoPE; None: nobody kept them
    """

    codec: Codec
    x_NC: Tensor
    queries: Callable[[Queries], Tensor] | None = None

    @cached_property
    def residual(self) -> Tensor:
        """Residuals of the prediction, float32 [N, C]."""
        return self.codec.residual(self.x_NC[None], Context())[0]


class Statistic(Generic[V]):
    """A statistic that a stage is fitted to. V: its value.

    passes   the passes of a calibration that it takes, in their order; of none, it is read off the model

        gradients   down the model, before the first layer
        capture     of a layer's keys, values and queries, for all recipes
        inputs      of what keys, or values, are predicted from, and of these
        residuals   of what the prediction leaves, which has to be fitted before
    """

    passes: ClassVar[tuple[Literal["gradients", "capture", "inputs", "residuals"], ...]]

    def of_row(self, row: Row) -> V:
        """Its value for one row. ValueError: that takes a calibration."""
        raise ValueError(f"{self} is not of one row; fit the stage by a calibration")


@dataclass(frozen=True)
class Residuals(Statistic[Tensor]):
    """A sample of what the prediction leaves of the tokens that are encoded: float32 [rows, C], or all there are."""

    passes = ("residuals",)
    rows: int = SAMPLE_ROWS

    def of_row(self, row: Row) -> Tensor:
        """Evenly spread."""
        count = len(row.residual)
        rows = min(self.rows, count)
        return row.residual[torch.arange(rows, device=row.residual.device) * count // rows]


@dataclass(frozen=True)
class ResidualMoment(Statistic[Tensor]):
    """The second moment about zero of what the prediction leaves, float64 [C, C]."""

    passes = ("residuals",)

    def of_row(self, row: Row) -> Tensor:
        return row.residual.double().mT @ row.residual.double() / len(row.residual)


class Queried(NamedTuple):
    """E[q qᵀ] of each KV head, float64 [H, D, D]; how many queries one KV head is multiplied with in a sequence."""

    moment_HDD: Tensor
    sequence: float


@dataclass(frozen=True)
class QueryMoment(Statistic[Queried]):
    """The second moment of a layer's queries, "after" RoPE or "before" it."""

    passes = ("capture",)
    queries: Queries = "after"

    def of_row(self, row: Row) -> Queried:
        if row.queries is None:
            return super().of_row(row)
        q_NC, geometry = row.queries(self.queries), row.codec.geometry
        return Queried(moment_of(q_NC, geometry), q_NC.numel() / geometry.width)


@dataclass
class Statistics:
    """The statistics that were collected so far for a scheme.

    mean_C   of the tokens that are encoded, float32; of keys before RoPE
    values   of what was requested
    seed     of random choices
    """

    mean_C: Tensor
    values: dict[Statistic[Any], Any] = field(default_factory=dict)
    seed: int = 0
    _directions: dict[Any, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)

    def __getitem__(self, asked: Statistic[V]) -> V:
        return self.values[asked]

    def directions(self, metric: Statistic[Tensor] | None = None, heads: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the latent variances of the residuals, falling, and the square matrices of which a basis stage stores
        the leading columns: "basis", and in a metric its "dual", float64. They are computed once.

        heads   of a basis by head: [H, D, D] each, and variances that go round the heads, falling in each
        """
        if (metric, heads) not in self._directions:
            moment_CC = self[ResidualMoment()]
            if not heads:
                variances_C, *matrices = eigen(moment_CC) if metric is None else eigen_in(self[metric], moment_CC)
            else:
                moments = _of_heads(moment_CC, heads)
                metrics = moments if metric is None else _of_heads(self[metric], heads)
                pairs = zip(metrics, moments, strict=True)
                solved = [eigen(moment) if metric is None else eigen_in(weighed, moment) for weighed, moment in pairs]
                variances, *matrices = map(torch.stack, zip(*solved, strict=True))
                variances_C = variances.mT.flatten()
            self._directions[metric, heads] = variances_C, dict(zip(("basis", "dual"), matrices, strict=False))
        return self._directions[metric, heads]


def _of_heads(moment_CC: Tensor, heads: int) -> list[Tensor]:
    """Return the part of each head, [D, D]."""
    size = len(moment_CC) // heads
    return [moment_CC[at : at + size, at : at + size] for at in range(0, len(moment_CC), size)]


def add_moment(total_HDD: Tensor, q_NTGD: Tensor) -> None:
    """Add Σ q qᵀ over all tokens, and over the query heads of each KV head, which are adjacent, in float64."""
    rows_HRD = q_NTGD.float().unflatten(2, (len(total_HDD), -1)).permute(2, 0, 1, 3, 4).flatten(1, 3)
    for tile_HRD in rows_HRD.split(TILE, 1):
        total_HDD += tile_HRD.mT @ tile_HRD


def moment_of(q_NC: Tensor, geometry: Geometry) -> Tensor:
    """E[q qᵀ] over the tokens and query heads of each KV head, float64 [H, D, D]."""
    shape = (geometry.kv_heads, geometry.head_size, geometry.head_size)
    total_HDD = torch.zeros(shape, dtype=torch.float64, device=q_NC.device)
    add_moment(total_HDD, q_NC[None].unflatten(-1, (-1, geometry.head_size)))
    return total_HDD * geometry.width / q_NC.numel()


def eigen(moment_CC: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, falling, and their eigenvectors as columns, float64."""
    symmetric = (moment_CC + moment_CC.mT).double() / 2
    values_C, vectors_CC = torch.linalg.eigh(symmetric)
    return values_C.flip(0).clamp_min(0), fixed_sign(vectors_CC.flip(1))


def eigen_in(metric_CC: Tensor, moment_CC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues of M^½ S M^½, falling; the basis M^½ V and its dual M^-½ V, float64.

    metric_CC   M, what an error costs: symmetric, positive definite
    """
    weights_C, axes_CC = eigen(metric_CC)
    root_C = weights_C.sqrt()
    half_CC, inverse_CC = ((axes_CC * scale) @ axes_CC.mT for scale in (root_C, 1 / root_C))
    values_C, vectors_CC = eigen(half_CC @ moment_CC.double() @ half_CC)
    return values_C, half_CC @ vectors_CC, inverse_CC @ vectors_CC


def fixed_sign(vectors_NR: Tensor) -> Tensor:
    """Flip columns so that the largest component of each is positive: eigenvectors come with either sign."""
    largest = vectors_NR.abs().argmax(0, keepdim=True)
    return vectors_NR * vectors_NR.gather(0, largest).sign()
