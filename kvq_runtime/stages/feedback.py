"""Round a head's channels block after block, and let the blocks that follow make up for what a block did to the scores.

Scores are products with queries, so an error that no query sees costs nothing. The stage sits between rotation and
rounding; what is stored, and how it is decoded, stays as it was without it. Its tensors are read by encoding alone.

Source: Wang et al., 2025 (SQuat), algorithm 1 and appendix A.2.
Differs: the moment of the queries is calibrated, once; the paper takes it from each prompt. g is D / `blocks`, so that
one recipe suits every head size: the paper's g = 64 and 32 of 128 channels are 2 and 4 blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import feedback
from kvq_runtime.stages import groups

Axis = Literal["token", "channel"]
Queries = Literal["after", "before", "averaged"]
Normalize = Literal["paper", "length-invariant"]


@dataclass(frozen=True)
class QueryOrthogonal:
    """Keep the rounding error of keys out of the directions of queries: P = I + λ C, for each KV head.

    blocks      of channels in a head, rounded one after the other
    lam         λ, at least 0: 0 is plain rounding
    rank        leading directions of C that count; 0: all
    normalize   "paper": C is the sum of q qᵀ over a calibration sequence and all query heads of the KV head, so that
                λ means something else at another length · "length-invariant": C is their mean, of mean eigenvalue 1
    queries     "after": as they are after RoPE, which is what keys after RoPE meet. Keys before RoPE meet queries that
                are turned by the distance between the two · "before": not turned, for what is near · "averaged": over
                all distances alike
    """

    kind: ClassVar[str] = "query_orthogonal"
    blocks: int = 2
    lam: float = 1.0
    rank: int = 0
    normalize: Normalize = "length-invariant"
    queries: Queries = "after"

    def __post_init__(self):
        if not 2 <= self.blocks <= 64:
            raise ValueError(f"blocks={self.blocks}; use 2 to 64: the last block has nothing to move")
        if not 0 <= self.lam <= 1e6:
            raise ValueError(f"lam={self.lam}; use 0 to 1000000")
        if self.rank < 0:
            raise ValueError(f"rank={self.rank}; use 0 for all directions, or how many")
        for name, allowed in (("normalize", get_args(Normalize)), ("queries", get_args(Queries))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; use one of {allowed}")

    def check(self, axis: Axis, rotate: Any, quantize: Any, geometry: Geometry) -> None:
        """Refuse what cannot be with this geometry."""
        head = geometry.head_size
        if head % self.blocks:
            fitting = [n for n in range(2, min(head, 64) + 1) if head % n == 0]
            raise ValueError(f"feedback: blocks={self.blocks} does not divide head size {head}; use one of {fitting}")
        if axis == "channel":
            return
        size = head // self.blocks
        group = groups.size(quantize.group, geometry.width, geometry)
        if size % group:
            raise ValueError(f"feedback: group={group} crosses blocks of {size} channels; use a divisor of {size}")
        turned = rotate.size(geometry.width, geometry) if rotate is not None else 1
        if head % turned:
            raise ValueError(
                f'feedback: a rotation of {turned} channels mixes heads of {head}; give rotate group="head"'
            )

    def specs(self, geometry: Geometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The fitted moves of `ops.feedback.updates`: names, shapes and dtypes."""
        heads, head = geometry.kv_heads, geometry.head_size
        size = head // self.blocks
        return {
            f"update_{block}": ((heads, head - block * size, size), torch.bfloat16) for block in range(1, self.blocks)
        }

    def turn(self, axis: Axis, rotate: Any, geometry: Geometry) -> Tensor | None:
        """B [D, D], the rotation of a head's channels where there is one: P becomes Bᵀ P B."""
        if rotate is None or axis == "channel":  # there, tokens are rotated, which leaves the cost of an error as it is
            return None
        matrix = rotate.matrix(geometry.width, geometry)
        return torch.block_diag(*[matrix] * (geometry.head_size // len(matrix)))

    def apply(
        self,
        x_NRW: Tensor,
        axis: Axis,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        rounded: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """What to round in place of `x`, rows as the quantizer sees them: tokens, or channels if `axis` says so."""
        heads = geometry.kv_heads
        moves = [tensors[f"update_{block}"].to(x_NRW.dtype) for block in range(1, self.blocks)]
        if axis == "channel":

            def of_rows(x_NHDK: Tensor, part: slice) -> Tensor:
                return rounded(x_NHDK[:, :, part].flatten(1, 2)).unflatten(1, (heads, -1))

            return feedback.push(x_NRW.unflatten(1, (heads, -1)), moves, of_rows).flatten(1, 2)

        def of_tokens(x_NHDK: Tensor, part: slice) -> Tensor:
            return _apart(rounded(_together(x_NHDK)), heads)[:, :, part]

        return _together(feedback.push(_apart(x_NRW, heads), moves, of_tokens))


def _apart(x_NTC: Tensor, heads: int) -> Tensor:
    return x_NTC.unflatten(2, (heads, -1)).permute(0, 2, 3, 1)


def _together(x_NHDT: Tensor) -> Tensor:
    return x_NHDT.permute(0, 3, 1, 2).flatten(2)


KINDS = (QueryOrthogonal,)
