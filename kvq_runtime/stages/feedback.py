"""Error feedback (SQuat): round a head's channels block by block; later blocks compensate the error in the scores.

Scores are products with queries, so an error orthogonal to all queries costs nothing. The stage sits between rotation
and rounding; what is stored, and how it is decoded, is the same as without it. Its tensors are used by encoding alone.

Source: Wang et al., 2025 (SQuat), algorithm 1 and appendix A.2.
Differs: the moment of the queries is calibrated, once; the paper takes it from each prompt. g is D / `blocks`, so that
one recipe suits every head size: the paper's g = 64 and 32 of 128 channels are 2 and 4 blocks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import feedback
from kvq_runtime.stages.stage import Axis, Feedback, Queries, Rounded, Scheme, Site, Specs, Tensors

Normalize = Literal["paper", "length-invariant"]
MAX_BLOCKS = 256  # blocks of a head


@dataclass(frozen=True)
class QueryOrthogonal(Feedback):
    """Keep the rounding error of keys out of the directions of queries: P = I + λ C, for each KV head.

    blocks      of channels in a head, rounded one after the other, 2 to 256; as many as channels: one by one
    lam         λ, at least 0: 0 is plain rounding
    rank        leading directions of C that count; 0: all
    normalize   "paper": C is the sum of q qᵀ over a calibration sequence and all query heads of the KV head, so that
                λ means something else at another length · "length-invariant": C is their mean, of mean eigenvalue 1
    queries     "after": as they are after RoPE, as for keys after RoPE. Keys before RoPE are multiplied by queries that
                are rotated by the distance between the two · "before": not rotated, for near tokens
    """

    kind: ClassVar[str] = "query_orthogonal"
    blocks: int = 2
    lam: float = 1.0
    rank: int = 0
    normalize: Normalize = "length-invariant"
    queries: Queries = "after"

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.blocks <= MAX_BLOCKS:
            raise ValueError(f"blocks={self.blocks}; use 2 to {MAX_BLOCKS}: the last block has nothing to move")
        if not 0 <= self.lam <= 1e6:
            raise ValueError(f"lam={self.lam}; use 0 to 1000000")
        if self.rank < 0:
            raise ValueError(f"rank={self.rank}; use 0 for all directions, or how many")

    def check(self, site: Site) -> None:
        if site.role == "value":
            raise ValueError("feedback needs queries, which values have none of; give feedback to keys alone")
        if site.position == "post" and self.queries != "after":
            raise ValueError('keys after RoPE are multiplied by queries after RoPE; use queries="after", or "pre"')
        scheme, geometry = site.scheme, site.geometry
        if scheme.quantize.keeps_dtype or scheme.quantize.takes_latents:
            raise ValueError(f"feedback needs channels that are rounded in groups, not {scheme.quantize.kind}")
        if geometry is not None:
            self._check_groups(site.scheme, geometry)

    def check_prompt_fit(self) -> None:
        """Allow it: a row's own queries have a moment."""

    def _check_groups(self, scheme: Scheme, geometry: Geometry) -> None:
        """Groups must lie inside the blocks of channels, and rotations inside heads."""
        head = geometry.head_size
        if head % self.blocks:
            fitting = [n for n in range(2, min(head, MAX_BLOCKS) + 1) if head % n == 0]
            raise ValueError(f"feedback: blocks={self.blocks} does not divide head size {head}; use one of {fitting}")
        if scheme.axis == "channel":
            return
        size, group = head // self.blocks, scheme.quantize.group_size(geometry.width, geometry)
        if group is None:
            raise ValueError(f"feedback needs channels that are rounded in groups, not {scheme.quantize.kind}; use rtn")
        if size % group:
            raise ValueError(f"feedback: group={group} crosses blocks of {size} channels; use a divisor of {size}")
        turned = scheme.rotate.size(geometry.width, geometry) if scheme.rotate is not None else 1
        if head % turned:
            raise ValueError(
                f'feedback: a rotation of {turned} channels mixes heads of {head}; give rotate group="head"'
            )

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the fitted moves of `ops.feedback.updates`."""
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

    def apply(self, x_NRW: Tensor, axis: Axis, geometry: Geometry, tensors: Tensors, rounded: Rounded) -> Tensor:
        """Return what to round in place of `x`, whose rows are tokens, or channels if `axis` is "channel"."""
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
