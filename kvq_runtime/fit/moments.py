"""Turn the second moment of a layer's queries into the moves of SQuat's feedback.

    after       E[q qᵀ], q = R_n q₀ as attention uses it          an error e of keys after RoPE meets q e
    before      E[q₀ q₀ᵀ]                                         q₀ as the projection puts it out
    averaged    E[R_δ q₀ q₀ᵀ R_δᵀ] over the distances δ

An error e of a key before RoPE, δ tokens before the query, meets (R_n q₀)ᵀ (R_n-δ e) = (R_δ q₀)ᵀ e. In a sequence of T
tokens, T - δ pairs of a query and a key have distance δ: so much δ counts in the average, as if attention looked at all
of them alike. It looks at what is near, where R_δ turns little: `before` is the other end, and in what was measured the
better one. Queries and distances are taken as independent, so that the average needs only the moment before RoPE.

Source: Wang et al., 2025 (SQuat), sections 3.2 and 3.3.
"""

import torch
from torch import Tensor

from kvq_runtime import rope
from kvq_runtime.ops import feedback
from kvq_runtime.stages.feedback import QueryOrthogonal

TILE = 1024  # rows of one float32 product, whose error grows with them; products are added in float64


def add(total_HDD: Tensor, q_NTGD: Tensor) -> None:
    """Add Σ q qᵀ over all tokens, and over the query heads of each KV head, which lie side by side, in float64."""
    rows_HRD = q_NTGD.float().unflatten(2, (len(total_HDD), -1)).permute(2, 0, 1, 3, 4).flatten(1, 3)
    for tile_HRD in rows_HRD.split(TILE, 1):
        total_HDD += tile_HRD.mT @ tile_HRD


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


def metric(stage: QueryOrthogonal, moment_HDD: Tensor, sequence: float) -> Tensor:
    """P of every KV head, float64 [H, D, D].

    moment     of the queries that the stage asks for
    sequence   queries that one KV head meets in a sequence
    """
    if stage.normalize == "paper":
        return feedback.metric(moment_HDD, stage.lam * sequence, stage.rank)
    trace_H = moment_HDD.diagonal(dim1=-2, dim2=-1).sum(-1)
    weight_H = torch.where(trace_H > 0, stage.lam * moment_HDD.shape[-1] / trace_H, 0.0)
    return feedback.metric(moment_HDD, weight_H, stage.rank)


def fit(stage: QueryOrthogonal, moment_HDD: Tensor, sequence: float, turn_DD: Tensor | None) -> dict[str, Tensor]:
    """The tensors of the stage, by name; `turn` is the rotation of a head's channels, if there is one."""
    metric_HDD = metric(stage, moment_HDD, sequence)
    if turn_DD is not None:
        turn = turn_DD.to(metric_HDD)
        metric_HDD = turn.mT @ metric_HDD @ turn
    moves = feedback.updates(metric_HDD, stage.blocks)
    return {f"feedback.update_{number}": move.to(torch.bfloat16) for number, move in enumerate(moves, start=1)}
