"""Turn the second moment of a layer's queries into the moves of SQuat's feedback.

An error e of a key changes a score by q e; what the moments `before` and `after` mean is in `statistics.py`.

Source: Wang et al., 2025 (SQuat), sections 3.2 and 3.3.
"""

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import QueryMoment, Statistics
from kvq_runtime.ops import feedback
from kvq_runtime.stages.feedback import QueryOrthogonal


def requests(stage: QueryOrthogonal) -> tuple[QueryMoment]:
    """Return the statistics that a fit needs."""
    return (QueryMoment(stage.queries),)


def solve(stage: QueryOrthogonal, statistics: Statistics, codec: Codec) -> tuple[QueryOrthogonal, dict[str, Tensor]]:
    """Return the tensors of the stage: a move for every block of channels but the last, bfloat16."""
    rotation_DD = stage.turn(codec.scheme.axis, codec.scheme.rotate, codec.geometry)
    return stage, moves(stage, *statistics[QueryMoment(stage.queries)], rotation_DD)


def moves(stage: QueryOrthogonal, moment_HDD: Tensor, sequence: float, rotation_DD: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of the stage, by name; `rotation` is that of a head's channels, if there is one."""
    metric_HDD = metric(stage, moment_HDD, sequence)
    if rotation_DD is not None:
        rotation = rotation_DD.to(metric_HDD)
        metric_HDD = rotation.mT @ metric_HDD @ rotation
    updates = feedback.updates(metric_HDD, stage.blocks)
    return {f"update_{number}": update.to(torch.bfloat16) for number, update in enumerate(updates, start=1)}


def metric(stage: QueryOrthogonal, moment_HDD: Tensor, sequence: float) -> Tensor:
    """P of every KV head, float64 [H, D, D].

    moment     of the queries that the stage asks for
    sequence   queries that one KV head is multiplied with in a sequence
    """
    if stage.normalize == "paper":
        return feedback.metric(moment_HDD, stage.lam * sequence, stage.rank)
    trace_H = moment_HDD.diagonal(dim1=-2, dim2=-1).sum(-1)
    weight_H = torch.where(trace_H > 0, stage.lam * moment_HDD.shape[-1] / trace_H, 0.0)
    return feedback.metric(moment_HDD, weight_H, stage.rank)
