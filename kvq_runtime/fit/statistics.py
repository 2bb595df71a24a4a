"""The statistics that stages are fitted to: of a calibration's chunks, or of one row of a cache.

A stage's fit module requests them (`requests`) as objects that say what they are: frozen dataclasses, of which equal
ones are collected once, whoever asks. Here are those that a row has, too; `kvq_calib/fit/scheme.py` has the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.fit import moments
from kvq_runtime.stages.stage import Queries

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
    """The second moment of a layer's queries: "after" RoPE, "before" it, or "averaged" over distances to a key."""

    passes = ("capture",)
    queries: Queries = "after"

    def of_row(self, row: Row) -> Queried:
        if row.queries is None or self.queries == "averaged":
            return super().of_row(row)
        q_NC, geometry = row.queries(self.queries), row.codec.geometry
        return Queried(moments.of(q_NC, geometry), q_NC.numel() / geometry.width)


@dataclass
class Statistics:
    """The statistics that were collected so far for a scheme.

    mean_C   of the tokens that are encoded, float32; of keys before RoPE
    found    values of what was requested
    seed     of random choices
    """

    mean_C: Tensor
    found: dict[Statistic[Any], Any] = field(default_factory=dict)
    seed: int = 0
    _directions: dict[Statistic[Tensor] | None, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)

    def __getitem__(self, asked: Statistic[V]) -> V:
        return self.found[asked]

    def directions(self, metric: Statistic[Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Latent variances of the residuals in a metric, if there is one, and matrices of their basis:
        `moments.directions`, found once."""
        if metric not in self._directions:
            metric_CC = None if metric is None else self[metric]
            self._directions[metric] = moments.directions(self[ResidualMoment()], metric_CC)
        return self._directions[metric]
