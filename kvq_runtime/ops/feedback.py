"""Error feedback in a metric: move the rounding error of one block of channels into the rest, away from the queries.

    P = I + λ C        the cost of an error e is e P eᵀ: its size, and its effect on scores of queries with moment C
    δ = -P_RR⁻¹ P_Rt d    the move of the channels R after block t that costs least once t has erred by d

Minimizing over R alone is enough, since channels up to t are fixed. Moves add up to the optimum for all errors so far,
-P_RR⁻¹ P_RS e_S, where S are the channels up to t. Every tensor may have leading dimensions, so that each head, and
each row of a batch, has its own P.

d = decoded - current, for the block as the moves before it have left it. R = D less the channels up to t · g = channels
of a block.

Source: Wang et al., 2025 (SQuat), equation 6 and lemma 2.
Differs: the paper reaches the same move through P⁻¹, B_t A_t⁻¹, and a recursion over t for A_t⁻¹ (lemma 3). This takes
one Cholesky factor for each block, of a matrix whose eigenvalues are at least 1.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def metric(moment_HDD: Tensor, weight: float | Tensor, rank: int = 0) -> Tensor:
    """P = I + weight · C, where C is the moment, or its part in the `rank` leading directions (0: all); float64.

    weight   one number, or one for each matrix
    """
    moment = (moment_HDD + moment_HDD.mT).double() / 2
    if 0 < rank < moment.shape[-1]:
        values, vectors = torch.linalg.eigh(moment)
        leading = vectors[..., -rank:] * values[..., None, -rank:].clamp_min(0).sqrt()
        moment = leading @ leading.mT
    scale = torch.as_tensor(weight, dtype=torch.float64, device=moment.device)
    return torch.eye(moment.shape[-1], dtype=torch.float64, device=moment.device) + scale[..., None, None] * moment


def updates(metric_HDD: Tensor, blocks: int) -> list[Tensor]:
    """-P_RR⁻¹ P_Rt of every block but the last: [H, D - g, g], [H, D - 2g, g], ..."""
    size, moves = metric_HDD.shape[-1] // blocks, []
    for start in range(size, size * blocks, size):
        factor = torch.linalg.cholesky(metric_HDD[..., start:, start:])
        moves.append(-torch.cholesky_solve(metric_HDD[..., start:, start - size : start], factor))
    return moves


def push(x_NHDK: Tensor, moves: Sequence[Tensor], rounded: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return the vectors to round in place of `x`: K of them for each head, channels in the second last dimension.

    moves     of `updates`: [H, R, g] each, or [N, H, R, g] where every row has its own
    rounded   rounds and decodes some channels of such a tensor, those of one block; none of another block may
              change it
    """
    x = x_NHDK.clone()
    for move_HRG in moves:
        end = x.shape[-2] - move_HRG.shape[-2]
        part = slice(end - move_HRG.shape[-1], end)
        x[..., end:, :] += move_HRG @ (rounded(x, part) - x[..., part, :])
    return x
