"""Store something of a block beside its rounding, to reduce the error.

sparse            a few elements exact: KVQuant's outliers
low_rank          the leading directions of each head's error: GEAR
low_rank_sparse   both
escape            whole tokens once more, in 8 bits
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack, rtn
from kvq_runtime.stages.stage import Correction, Fields, Site, Specs, Tensors

ESCAPE_BITS = 8


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
    papers: ClassVar[tuple[str, ...]] = ("2401.18079",)
    share: float = 0.01
    group: Literal["token", "channel", "block"] = "token"

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.share <= 0.25:
            raise ValueError(f"share={self.share}; use more than 0 and at most 0.25 of the elements")

    def memory_kind(self, field: str) -> str:
        return "outliers"

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """The fields of a block beside the quantizer's."""
        width = geometry.width
        shapes = {"token": (block, width), "channel": (width, block), "block": (1, block * width)}
        groups, size = shapes[self.group]
        count = groups * self._count(size)
        return {
            "sparse_place": ((pack.places_size(count, _place_bits(size)),), torch.uint8),
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

    Outliers are set aside, the rest is rounded, the error is what remains when they are back in their places, and a
    reader puts them in place last.

    Differs: what the product adds to an outlier is overwritten by its value (theirs: stays).
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


@dataclass(frozen=True)
class Escape(Correction):
    """Store up to `slots` tokens of a block by plain rounding in 8 bits, all channels of a token in one group.

    limit   a token is a candidate when its error is this many times the mean error of the calibration's tokens

    A token is a candidate when its squared error, summed over channels, exceeds the calibrated bound. A block has a
    fixed number of slots; if candidates outnumber them, the largest errors win. The number of candidates is stored, so
    that a rising rate can be seen. Copies that fill the slots of padding or exact sinks are candidates like their
    original; ties go to the last, so never to a copy.

    What a slot costs, 8 bits / block per element, is billed whether it is used or not: shapes are the same for all
    blocks.
    """

    kind: ClassVar[str] = "escape"
    fitted: ClassVar[bool] = True
    slots: int = 1
    limit: float = 8.0

    def __post_init__(self):
        if not 1 <= self.slots <= 128:
            raise ValueError(f"slots={self.slots}; use 1 to 128")
        if not 1 < self.limit < 1e6:
            raise ValueError(f"limit={self.limit}; use more than 1 and less than 1000000")

    def check(self, site: Site) -> None:
        if site.scheme.axis != "token" or site.window.block > 32767:
            raise ValueError('escape needs axis "token" and blocks below 32768')

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The fitted bound: a token's squared error, float32 [1]."""
        return {"bound": ((1,), torch.float32)}

    def memory_kind(self, field: str) -> str:
        return "escapes"

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """The fields of a block beside the quantizer's; a place of -1 is an unused slot."""
        return {
            "escape_codes": ((self.slots, geometry.width), torch.uint8),
            "escape_step": ((self.slots,), torch.float16),
            "escape_low": ((self.slots,), torch.float16),
            "escape_place": ((self.slots,), torch.int16),
            "escape_wanted": ((1,), torch.int16),
        }

    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Choose tokens of blocks by the error x - `rounded`, and encode them."""
        error_NT = (x_NTC - rounded_NTC.float()).square().sum(-1)
        wants_NT = error_NT > tensors["bound"]
        last = x_NTC.shape[1] - 1
        worst = last - error_NT.flip(1).sort(dim=1, descending=True, stable=True).indices[:, : self.slots]
        worst = torch.nn.functional.pad(worst, (0, self.slots - worst.shape[1]))
        place = torch.where(wants_NT.gather(1, worst), worst, -1)
        place = place.where(torch.arange(self.slots, device=place.device) <= last, -1)
        chosen = x_NTC.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, x_NTC.shape[-1]))
        codes, step, low = rtn.encode(chosen.where(place[..., None] >= 0, 0.0), ESCAPE_BITS)
        wanted = wants_NT.sum(1, keepdim=True)
        fields = {"codes": codes, "step": step, "low": low}
        fields |= {"place": place.to(torch.int16), "wanted": wanted.to(torch.int16)}
        return {f"escape_{name}": field for name, field in fields.items()}

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Replace the escaped tokens by their 8-bit values, in the same tensor."""
        blocks, slots = (fields["escape_place"] >= 0).nonzero(as_tuple=True)
        if len(blocks):
            part = [fields[f"escape_{name}"][blocks, slots] for name in ("codes", "step", "low", "place")]
            rounded_NTC[blocks, part[3].long()] = rtn.decode(part[0], part[1], part[2], ESCAPE_BITS).to(
                rounded_NTC.dtype
            )
        return rounded_NTC

    def count(self, fields: Fields) -> tuple[int, int]:
        """(tokens stored in slots, candidates) of these blocks."""
        return int((fields["escape_place"] >= 0).sum()), int(fields["escape_wanted"].sum())
