"""Store something of a block beside its rounding, to reduce the error.

sparse            a few elements exact: KVQuant's outliers
low_rank          the leading directions of each head's error: GEAR
low_rank_sparse   both
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack
from kvq_runtime.stages.stage import Correction, Fields, Site, Specs, Tensors


@dataclass(frozen=True)
class Sparse(Correction):
    """Store a share of every group's elements in bfloat16, at least one: KVQuant's outliers, dense and sparse.

    share   of the elements
    group   "token": of every token · "channel": of every channel of a block: for ranges that are taken online;
            "block": of the whole block, without a change of what is rounded: for ranges that are calibrated

    One element far from all others sets the range that all others are rounded in. Of every group the elements that are
    farthest from its median are first replaced by the median, so that a quantizer takes its ranges from the rest; after
    rounding, the elements with the largest error, which are those, are stored as (place, value).

    The number of entries is fixed, so that all blocks have the same shapes, and every entry is used: where a group has
    no outlier the elements with the largest error are stored, which never increases the error. Copies of a real token,
    in the slots of padding or exact sinks, take entries as that token does.

    Source: Hooper et al., 2024 (KVQuant), section 3.4 (per-vector dense-and-sparse quantization).
    Differs: KVQuant stores as many outliers as exceed thresholds, in compressed rows; its option to cap them is the
    rule here. A place has as many bits as its group needs. Values are bfloat16, which holds any outlier that a model's
    does.
    """

    kind: ClassVar[str] = "sparse"
    share: float = 0.01
    group: Literal["token", "channel", "block"] = "token"

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.share <= 0.25:
            raise ValueError(f"share={self.share}; use more than 0 and at most 0.25 of the elements")

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """Return the fields of a block beside the quantizer's."""
        width = geometry.width
        shapes = {"token": (block, width), "channel": (width, block), "block": (1, block * width)}
        groups, size = shapes[self.group]
        count = groups * self._count(size)
        return {
            "sparse_place": ((pack.places_size(count, _place_bits(size)),), torch.uint8),
            "sparse_value": ((count,), torch.bfloat16),
        }

    def rest(self, x_NTC: Tensor) -> Tensor:
        """Return the quantizer's input: outliers are replaced by the median of their group."""
        if self.group == "block":
            return x_NTC
        x_NGK = self._grouped(x_NTC)
        middle = (x_NGK.shape[-1] - 1) // 2
        median = x_NGK.sort(-1).values[..., middle : middle + 1]  # Tensor.median has no deterministic form on a GPU
        place = (x_NGK - median).abs_().topk(self._count(x_NGK.shape[-1]), -1).indices
        return self._ungrouped(x_NGK.scatter(-1, place, median.expand(place.shape)), x_NTC)

    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Choose the elements of blocks by the error x - `rounded`."""
        error_NGK = self._grouped((x_NTC - rounded_NTC.float()).abs_())
        size = error_NGK.shape[-1]
        place = error_NGK.topk(self._count(size), -1).indices.sort(-1).values
        value = self._grouped(x_NTC).gather(-1, place).to(torch.bfloat16)
        return {"sparse_place": pack.pack_places(place.flatten(1), _place_bits(size)), "sparse_value": value.flatten(1)}

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Replace the outliers by their exact values, in the same tensor if possible."""
        x_NGK = self._grouped(rounded_NTC)
        shape = (*x_NGK.shape[:2], self._count(x_NGK.shape[-1]))
        place = pack.unpack_places(fields["sparse_place"], _place_bits(x_NGK.shape[-1]), shape[1] * shape[2])
        x_NGK.scatter_(-1, place.view(shape), fields["sparse_value"].view(shape).to(x_NGK.dtype))
        return self._ungrouped(x_NGK, rounded_NTC)

    def _count(self, size: int) -> int:
        return max(1, round(self.share * size))

    def _grouped(self, x_NTC: Tensor) -> Tensor:
        """[N, groups, elements of a group]."""
        if self.group == "block":
            return x_NTC.flatten(1)[:, None]
        return x_NTC if self.group == "token" else x_NTC.mT

    def _ungrouped(self, x_NGK: Tensor, like_NTC: Tensor) -> Tensor:
        return x_NGK.mT if self.group == "channel" else x_NGK.view(like_NTC.shape)


def _place_bits(size: int) -> int:
    """Bits of a place in a group of `size` elements."""
    return max(1, (size - 1).bit_length())


@dataclass(frozen=True)
class LowRank(Correction):
    """Store the error's part in its `rank` leading directions, for every head of every block (GEAR).

    rank    at most the tokens of a block, and the channels of a head, where all of the error is stored

    The rounding error of a head's block, E [T, D], is not pure noise where tokens are alike. Its leading directions V
    [D, R], the eigenvectors of EᵀE with the largest eigenvalues, are stored with the error's share in them, E V [T, R]:

        x̂ = rounded + (E V) Vᵀ        the best approximation of E of rank R; the error is never larger than without it

    Both factors are float16: 16 R (1/D + 1/T) bits per element. Each block has its own, so that stored blocks never
    change.

    Source: Kang et al., 2024 (GEAR), algorithm 1: what is rounded, a matrix of low rank by head, and a sparse one; the
    order of steps as in the authors' published code.
    Differs: directions are exact (theirs: a few power iterations from random ones), so that the same tokens make the
    same bytes; factors belong to a block (theirs: to the whole prompt, and to each buffer of generated tokens); what
    the product adds to an outlier is overwritten by its value (theirs: stays).
    """

    kind: ClassVar[str] = "low_rank"
    rank: int = 4

    def __post_init__(self):
        if not 1 <= self.rank <= 256:
            raise ValueError(f"rank={self.rank}; use 1 to 256")

    def check(self, site: Site) -> None:
        if site.geometry is not None:
            self.fields(site.window.block, site.geometry)

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """Return the fields of a block beside the quantizer's; a rank that it cannot have is a ValueError."""
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
class LowRankSparse(LowRank):
    """Both: single elements exact, as `Sparse`, and of the error of all others the leading directions, as `LowRank`.

    share, group    of `Sparse`

    Outliers are set aside, the rest is rounded, the error is what remains when they are back in their places, and a
    reader puts them in place last.
    """

    kind: ClassVar[str] = "low_rank_sparse"
    share: float = 0.02
    group: Literal["token", "channel", "block"] = "token"

    def __post_init__(self):
        super().__post_init__()
        assert self.sparse  # which refuses settings that cannot be

    @property
    def sparse(self) -> Sparse:
        """The correction that keeps outliers exact."""
        return Sparse(self.share, self.group)

    def fields(self, block: int, geometry: Geometry) -> Specs:
        return self.sparse.fields(block, geometry) | super().fields(block, geometry)

    def rest(self, x_NTC: Tensor) -> Tensor:
        return self.sparse.rest(x_NTC)

    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Choose outliers of blocks, then factor what they and `rounded`, which is overwritten, leave of `x`."""
        outliers = self.sparse.encode(x_NTC, rounded_NTC, geometry, tensors)
        corrected_NTC = self.sparse.apply(rounded_NTC, outliers)
        return outliers | super().encode(x_NTC, corrected_NTC, geometry, tensors)

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Add the product of the factors, then put the exact elements in place."""
        return self.sparse.apply(super().apply(rounded_NTC, fields), fields)
