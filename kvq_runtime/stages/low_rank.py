"""Add a low-rank approximation of the rounding error, for every head of every block (GEAR).

The rounding error of a head's block, E [T, D], is not pure noise where tokens are alike. Its leading directions
V [D, R], the eigenvectors of EᵀE with the largest eigenvalues, are stored with the error's share in them, E V [T, R]:

    x̂ = rounded + (E V) Vᵀ        the best approximation of E of rank R; the error is never larger than without it

Both factors are float16: 16 R (1/D + 1/T) bits per element. Each block has its own, so that stored blocks never change.

`LowRankSparse` keeps outliers exact as well: they are set aside, the rest is rounded, E is what remains when outliers
are back in their places, and a reader puts them in place last.

Source: Kang et al., 2024 (GEAR), algorithm 1: what is rounded, a matrix of low rank by head, and a sparse one; the
order of steps as in the authors' published code.
Differs: directions are exact (theirs: a few power iterations from random ones), so that the same tokens make the same
bytes; factors belong to a block (theirs: to the whole prompt, and to each buffer of generated tokens); what the product
adds to an outlier is overwritten by its value (theirs: stays).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.sparse import Sparse
from kvq_runtime.stages.stage import Correction, Fields, Site, Specs, Tensors


@dataclass(frozen=True)
class LowRank(Correction):
    """Store the error's part in its `rank` leading directions, by head.

    rank    at most the tokens of a block, and the channels of a head, where all of the error is stored
    """

    kind: ClassVar[str] = "low_rank"
    papers: ClassVar[tuple[str, ...]] = ("2403.05527",)
    rank: int = 4

    def __post_init__(self):
        if not 1 <= self.rank <= 256:
            raise ValueError(f"rank={self.rank}; use 1 to 256")

    def check(self, site: Site) -> None:
        if site.geometry is not None:
            self.fields(site.window.block, site.geometry)

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """The fields of a block beside the quantizer's; a rank that it cannot have is a ValueError."""
        heads, size = geometry.kv_heads, geometry.head_size
        if self.rank > min(block, size):
            raise ValueError(f"rank={self.rank} of blocks [{block}, {size}]; use at most {min(block, size)}")
        return {
            "low_rank_token": ((heads, block, self.rank), torch.float16),
            "low_rank_channel": ((heads, size, self.rank), torch.float16),
        }

    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Factor the error x - `rounded`."""
        error_NHTD = (x_NTC - rounded_NTC.float()).unflatten(-1, (geometry.kv_heads, -1)).transpose(1, 2)
        vectors_NHDD = torch.linalg.eigh(error_NHTD.mT @ error_NHTD).eigenvectors  # eigenvalues ascend
        channel = vectors_NHDD[..., -self.rank :].half()
        return {"low_rank_token": (error_NHTD @ channel.float()).half(), "low_rank_channel": channel}

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Add the product of the factors to what the quantizer made, in the same tensor."""
        error_NHTD = fields["low_rank_token"].float() @ fields["low_rank_channel"].float().mT
        return rounded_NTC.add_(error_NHTD.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class LowRankSparse(Correction):
    """Both: single elements exact, as `Sparse`, and of the error of all others the leading directions, as `LowRank`.

    rank            of `LowRank`
    share, group    of `Sparse`
    """

    kind: ClassVar[str] = "low_rank_sparse"
    papers: ClassVar[tuple[str, ...]] = ("2403.05527",)
    rank: int = 4
    share: float = 0.02
    group: Literal["token", "channel", "block"] = "token"

    def __post_init__(self):
        assert self.low_rank and self.sparse  # which refuse settings that cannot be

    def check(self, site: Site) -> None:
        self.low_rank.check(site)

    @property
    def low_rank(self) -> LowRank:
        """The correction of the error of all elements but the outliers."""
        return LowRank(self.rank)

    @property
    def sparse(self) -> Sparse:
        """The correction that keeps outliers exact."""
        return Sparse(self.share, self.group)

    def memory_kind(self, field: str) -> str:
        return "outliers" if field.startswith("sparse_") else "scales"

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """The fields of a block beside the quantizer's."""
        return self.sparse.fields(block, geometry) | self.low_rank.fields(block, geometry)

    def rest(self, x_NTC: Tensor) -> Tensor:
        """Return what the quantizer has to round: all but the outliers."""
        return self.sparse.rest(x_NTC)

    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Choose outliers of blocks, then factor what they and `rounded`, which is overwritten, leave of `x`."""
        found = self.sparse.encode(x_NTC, rounded_NTC, geometry, tensors)
        corrected_NTC = self.sparse.apply(rounded_NTC, found)
        return found | self.low_rank.encode(x_NTC, corrected_NTC, geometry, tensors)

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Add the product of the factors, then put the exact elements in place."""
        return self.sparse.apply(self.low_rank.apply(rounded_NTC, fields), fields)
