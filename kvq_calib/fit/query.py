"""Turn the second moment of a layer's queries into the moves of SQuat's feedback; say how well a subspace holds them.

    after       E[q qᵀ], q = R_n q₀ as attention uses it          an error e of keys after RoPE meets q e
    before      E[q₀ q₀ᵀ]                                         q₀ as the projection puts it out
    averaged    E[R_δ q₀ q₀ᵀ R_δᵀ] over the distances δ

An error e of a key before RoPE, δ tokens before the query, meets (R_n q₀)ᵀ (R_n-δ e) = (R_δ q₀)ᵀ e. In a sequence of T
tokens, T - δ pairs of a query and a key have distance δ: so much δ counts in the average, as if attention looked at all
of them alike. It looks at what is near, where R_δ turns little: `before` is the other end, and in what was measured the
better one. Queries and distances are taken as independent, so that the average needs only the moment before RoPE.

deviation   of a query from a subspace: the length of what sticks out of it, over the query's own

Source: Wang et al., 2025 (SQuat), sections 3.2 and 3.3, definition 1.
Differs: the moment is calibrated. Deviations are root mean squares over held-out queries and heads, the paper's are
those of one sequence's tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_calib.statistics import QueryMoments
from kvq_runtime import rope
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import feedback
from kvq_runtime.stages.feedback import QueryOrthogonal

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Queries:
    """What is known of a layer's queries.

    before, after   second moments, float64 [H, D, D]
    rope            cos and sin of the positions 0 to T - 1 of a sequence, [1, T, K]
    sequence        queries that one KV head meets in a sequence
    """

    before: Tensor
    after: Tensor
    rope: Pair
    sequence: float

    def moment(self, stage: QueryOrthogonal) -> Tensor:
        """The moment that the stage asks for."""
        if stage.queries == "averaged":
            return averaged(self.before, *self.rope)
        return self.before if stage.queries == "before" else self.after


class Gathered:
    """The queries of one layer, chunk by chunk: those to fit on, and the held-out ones, each of length 1."""

    def __init__(self, geometry: Geometry, tables: Pair, fitted: int, device: torch.device | str = "cpu"):
        self._geometry, self._tables, self._fitted, self._device = geometry, tables, fitted, device
        self._sums = [QueryMoments(geometry, device) for _ in ("fitted", "held out")]
        self._sequence = 0.0

    def partial(self, index: int, q_NTC: Tensor) -> QueryMoments:
        """What a chunk's queries, before RoPE, say."""
        q_NTGD = q_NTC.float().unflatten(-1, (-1, self._geometry.head_size))
        if index >= self._fitted:
            q_NTGD = torch.nn.functional.normalize(q_NTGD, dim=-1)
        partial = QueryMoments(self._geometry, self._device)
        partial.update(q_NTGD, self._tables)
        return partial

    def merge(self, index: int, partial: QueryMoments, sequences: int) -> None:
        """Add what a chunk of so many sequences says; chunk 0 first, then each next one."""
        held = index >= self._fitted
        self._sequence = float(partial.sums["count"]) / sequences
        self._sums[held].merge(index - held * self._fitted, partial)

    def add(self, index: int, q_NTC: Tensor) -> None:
        """Add a chunk's queries, here and now."""
        self.merge(index, self.partial(index, q_NTC), len(q_NTC))

    def value(self) -> tuple[Queries, Queries | None]:
        """Those to fit on, and the held-out ones, if there are any."""
        fitted, held = (
            Queries(*sums.value(), self._tables, self._sequence) if sums.merged else None for sums in self._sums
        )
        assert fitted is not None, "a fit without chunks"
        return fitted, held


def averaged(moment_HDD: Tensor, cos_NTK: Tensor, sin_NTK: Tensor) -> Tensor:
    """E[R_δ C R_δᵀ] over the distances in a sequence of T tokens: products of cosines and sines, averaged over them."""
    size, half = moment_HDD.shape[-1], cos_NTK.shape[-1]
    cos_TD, sin_TD = (part[0].double() for part in rope.spread(cos_NTK, sin_NTK, 1, size))
    weight_T = torch.arange(len(cos_TD), 0, -1, dtype=torch.float64, device=cos_TD.device)
    weight_T1 = (weight_T / weight_T.sum())[:, None]
    partner = torch.arange(size, device=cos_TD.device)  # channel i becomes cos · x_i + sin · x_partner
    partner[: 2 * half] = partner[: 2 * half].roll(-half)
    cos_cos, cos_sin, sin_sin = (
        (weight_T1 * one).mT @ other for one, other in ((cos_TD, cos_TD), (cos_TD, sin_TD), (sin_TD, sin_TD))
    )
    own_HDD, mixed_HDD = moment_HDD, moment_HDD[..., partner]
    straight = cos_cos * own_HDD + cos_sin * mixed_HDD
    return straight + cos_sin.mT * own_HDD[:, partner] + sin_sin * mixed_HDD[:, partner]


def metric(stage: QueryOrthogonal, queries: Queries) -> Tensor:
    """P of every KV head, float64 [H, D, D]."""
    moment_HDD = queries.moment(stage)
    if stage.normalize == "paper":
        return feedback.metric(moment_HDD, stage.lam * queries.sequence, stage.rank)
    trace_H = moment_HDD.diagonal(dim1=-2, dim2=-1).sum(-1)
    weight_H = torch.where(trace_H > 0, stage.lam * moment_HDD.shape[-1] / trace_H, 0.0)
    return feedback.metric(moment_HDD, weight_H, stage.rank)


def fit(stage: QueryOrthogonal, queries: Queries, turn_DD: Tensor | None) -> dict[str, Tensor]:
    """The tensors of the stage, by name; `turn` is the rotation of a head's channels, if there is one."""
    metric_HDD = metric(stage, queries)
    if turn_DD is not None:
        turn = turn_DD.to(metric_HDD)
        metric_HDD = turn.mT @ metric_HDD @ turn
    moves = feedback.updates(metric_HDD, stage.blocks)
    return {f"feedback.update_{number}": move.to(torch.bfloat16) for number, move in enumerate(moves, start=1)}


def deviations(stage: QueryOrthogonal, queries: Queries, held: Queries) -> list[float]:
    """Of the held-out queries from the 1, 2, ..., D leading directions, over all heads."""
    vectors_HDD = torch.linalg.eigh(queries.moment(stage)).eigenvectors.flip(-1)
    moment_HDD = held.moment(stage)
    inside_HD = (vectors_HDD * (moment_HDD @ vectors_HDD)).sum(-2).cumsum(-1)
    share_HD = inside_HD / moment_HDD.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    return [round(value, 4) for value in (1 - share_HD.mean(0)).clamp_min(0).sqrt().tolist()]
