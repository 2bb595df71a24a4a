"""Keep a few elements of every block exact, beside the codes of all: KVQuant's outliers, dense and sparse.

One element far from all others sets the range that all others are rounded in. Of every group the elements that are
farthest from its median are first replaced by the median, so that a quantizer takes its ranges from the rest; after
rounding, the elements with the largest error, which are those, are stored as (place, value).

The number of entries is fixed, so that all blocks have the same shapes, and every entry is used: where a group has no
outlier the elements with the largest error are stored, which never increases the error. Copies of a real token, in the
slots of padding or exact sinks, take entries as that token does.

Source: Hooper et al., 2024 (KVQuant), section 3.4 (per-vector dense-and-sparse quantization).
Differs: KVQuant stores as many outliers as exceed thresholds, in compressed rows; its option to cap them is the rule
here. A place has as many bits as its group needs. Values are bfloat16, which holds any outlier that a model's does.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack
from kvq_runtime.stages.stage import Correction, Fields, Specs, Tensors

GROUPS = ("token", "channel", "block")


@dataclass(frozen=True)
class Sparse(Correction):
    """Store a share of every group's elements in bfloat16, at least one.

    share   of the elements
    group   "token": of every token · "channel": of every channel of a block: for ranges that are taken online;
            "block": of the whole block, without a change of what is rounded: for ranges that are calibrated
    """

    kind: ClassVar[str] = "sparse"
    papers: ClassVar[tuple[str, ...]] = ("2401.18079",)
    share: float = 0.01
    group: Literal["token", "channel", "block"] = "token"

    def __post_init__(self):
        if not 0 < self.share <= 0.25:
            raise ValueError(f"share={self.share}; use more than 0 and at most 0.25 of the elements")
        if self.group not in GROUPS:
            raise ValueError(f"group={self.group!r}; use one of {GROUPS}")

    def memory_kind(self, field: str) -> str:
        return "outliers"

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """The fields of a block beside the quantizer's."""
        width = geometry.width
        shapes = {"token": (block, width), "channel": (width, block), "block": (1, block * width)}
        groups, size = shapes[self.group]
        count = groups * self._count(size)
        return {
            "sparse_place": ((pack.places_size(count, _bits(size)),), torch.uint8),
            "sparse_value": ((count,), torch.bfloat16),
        }

    def rest(self, x_NTC: Tensor) -> Tensor:
        """The quantizer's input: outliers are replaced by the median of their group."""
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
        return {"sparse_place": pack.pack_places(place.flatten(1), _bits(size)), "sparse_value": value.flatten(1)}

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Replace the outliers by their exact values, in the same tensor if possible."""
        x_NGK = self._grouped(rounded_NTC)
        shape = (*x_NGK.shape[:2], self._count(x_NGK.shape[-1]))
        place = pack.unpack_places(fields["sparse_place"], _bits(x_NGK.shape[-1]), shape[1] * shape[2])
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


def _bits(size: int) -> int:
    """Bits of a place in a group of `size` elements."""
    return max(1, (size - 1).bit_length())
