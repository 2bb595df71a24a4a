"""Let attention say when the oldest exact tokens may be encoded.

A new token attends to the newest tokens most. Where the oldest token of the window, its *edge*, is attended to no less
than the newest one, the block that begins with it is kept exact for another forward pass.

    keep  ⇔  mean of A_new ≤ mean of A_edge          A: weights of the newest query, after the softmax

Means are over layers, query heads and rows: one decision for the whole cache, so that all layers and both halves hold
the same blocks.

Source: Zeng et al., 2025 (SubKV), sections 3.3 and 3.5.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dynamic:
    """Keep up to `blocks` blocks exact beyond the recent tokens, as long as attention asks for it. 1 to 1024."""

    kind: ClassVar[str] = "dynamic"
    blocks: int = 3

    def __post_init__(self):
        if not 1 <= self.blocks <= 1024:
            raise ValueError(f"blocks={self.blocks}; use 1 to 1024")

    def most(self, recent: int, block: int) -> int:
        """What `recent` is while the window keeps what it may."""
        return recent + self.blocks * block


def edges(edge: int, sinks: int, real_BT: Tensor | None, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Each row's edge among `length` slots, int64 [B], and whether it has a say, bool [B].

    edge    the first slot that stays exact; a row's edge is its first real token from there on that is no sink
    like    of B rows, where the result shall be

    A row has no say if its newest token is padding, or its edge is not older than its newest token.
    """
    newest = length - 1
    if real_BT is None:
        first_B = torch.full((len(like),), max(edge, sinks), device=like.device)
        return first_B.clamp(max=newest), first_B < newest
    able_BT = real_BT & (real_BT.cumsum(1) > sinks)
    able_BT[:, :edge] = False
    first_B = able_BT.int().argmax(1)
    return first_B, able_BT[:, newest] & (first_B < newest)


def gaps(p_BHGT: Tensor, edge: int, sinks: int, real_BT: Tensor | None) -> Tensor:
    """A_new - A_edge of each row, means over heads: float32 [B], NaN for a row that has no say; see `edges`.

    p_BHGT  the newest query's weights; on tokens that padding hides they are never looked at
    """
    first_B, heard_B = edges(edge, sinks, real_BT, p_BHGT, p_BHGT.shape[-1])
    p_BHG = p_BHGT.gather(-1, first_B.view(-1, 1, 1, 1).expand(*p_BHGT.shape[:3], 1))[..., 0]
    return (p_BHGT[..., -1] - p_BHG).mean((1, 2)).where(heard_B, torch.nan)


def keep(gaps_LB: Tensor) -> bool:
    """The decision; where no row has a say, nothing is kept."""
    return float(gaps_LB.double().nanmean()) <= 0


KINDS = (Dynamic,)
