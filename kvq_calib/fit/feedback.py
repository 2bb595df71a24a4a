"""Sum the second moments of a layer's queries, for SQuat's feedback; measure how well a subspace holds queries.

The moments are turned into moves by `kvq_runtime.fit.feedback`, which a cache that fits to its own prompt shares.

deviation   of a query from a subspace: the length of what sticks out of it, over the query's own

Source: Wang et al., 2025 (SQuat), definition 1.
Differs: the moment is calibrated. Deviations are root mean squares over held-out queries and heads, the paper's are
those of one sequence's tokens.
"""

import torch
from torch import Tensor

from kvq_calib.fit.statistics import LayerQueries, QueryMoments
from kvq_runtime.fit.feedback import requests, solve
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.stage import Feedback

__all__ = ["QuerySums", "deviations", "requests", "solve"]

Pair = tuple[Tensor, Tensor]


class QuerySums:
    """The queries of one layer, chunk by chunk: those to fit on, and the held-out ones, each of length 1."""

    def __init__(self, geometry: Geometry, tables: Pair, fitted: int, device: torch.device | str = "cpu"):
        self._geometry, self._tables, self._fitted, self._device = geometry, tables, fitted, device
        self._sums = [QueryMoments(geometry, device) for _ in ("fitted", "held out")]
        self._sequence = 0.0

    def partial(self, index: int, q_NTC: Tensor) -> QueryMoments:
        """The sums of a chunk's queries, which are before RoPE."""
        q_NTGD = q_NTC.float().unflatten(-1, (-1, self._geometry.head_size))
        if index >= self._fitted:
            q_NTGD = torch.nn.functional.normalize(q_NTGD, dim=-1)
        partial = QueryMoments(self._geometry, self._device)
        partial.update(q_NTGD, self._tables)
        return partial

    def merge(self, index: int, partial: QueryMoments, sequences: int) -> None:
        """Add the sums of a chunk of `sequences` sequences; chunk 0 first, then each next one."""
        held = index >= self._fitted
        self._sequence = float(partial.sums["count"]) / sequences
        self._sums[held].merge(index - held * self._fitted, partial)

    def value(self) -> tuple[LayerQueries, LayerQueries | None]:
        """Return the queries to fit on, and the held-out ones, if there are any."""
        fitted, held = (
            LayerQueries(*sums.value(), self._sequence, self._tables) if sums.merged else None for sums in self._sums
        )
        assert fitted is not None, "a fit without chunks"
        return fitted, held


def deviations(stage: Feedback, queries: LayerQueries, held: LayerQueries) -> list[float]:
    """Return how far held-out queries deviate from the 1, 2, ..., D leading directions, over all heads."""
    vectors_HDD = torch.linalg.eigh(queries.moment(stage.queries)).eigenvectors.flip(-1)
    moment_HDD = held.moment(stage.queries)
    inside_HD = (vectors_HDD * (moment_HDD @ vectors_HDD)).sum(-2).cumsum(-1)
    share_HD = inside_HD / moment_HDD.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    return [round(value, 4) for value in (1 - share_HD.mean(0)).clamp_min(0).sqrt().tolist()]
