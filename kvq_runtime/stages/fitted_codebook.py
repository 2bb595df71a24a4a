"""Quantize by a codebook that is fitted to the model, so that a token stores little but codes.

coupled      a codebook for every few neighbouring channels: CQ
nuq          one for all channels, between ends of a channel or a token: KVQuant
"""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import grid, pack, product
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors

Means = Literal["euclidean", "gain-shape"]


@dataclass(frozen=True)
class Coupled(Quantizer):
    """Encode `channels` neighbouring channels of a token by one code.

    channels   how many are coupled; divides the head size
    bits       of a code, 1 to 8: bits / channels for each element
    means      a centroid is the "euclidean" mean of its vectors, or the mean of their lengths along the mean of their
               directions, "gain-shape": as long as they are, where the mean is shorter

        code of group g = argmin_k |x_g - m_gk|²        x̂_g = m_gk

    Channels of a token depend on each other, so that their joint entropy is below the sum of their own: one code of b
    bits for c channels loses less than c codes of b / c bits. Nothing is stored of a token but its codes; the
    codebooks, of 2^b points for each group of c channels, are calibrated, once for all prompts.

    Source: Zhang et al., 2024 (CQ, arXiv 2405.03917), sections 3.2 and 3.3. Gain and shape: Kim et al., 2026 (GSRQ,
    arXiv 2607.01065).
    Differs: centroids are rounded to float16, and points are not weighted by Fisher information, see the fit.
    """

    kind: ClassVar[str] = "coupled"
    papers: ClassVar[tuple[str, ...]] = ("2405.03917",)
    fitted: ClassVar[bool] = True
    slack: ClassVar[float] = 2.5  # a codebook of as few tokens as it has centroids
    channels: int = 4
    bits: int = 8
    _: KW_ONLY  # younger than the file format
    means: Means = "euclidean"

    def __post_init__(self):
        super().__post_init__()
        if self.channels < 1:
            raise ValueError(f"channels={self.channels}; use 1 or more that divide the head size, such as 2, 4 or 8")
        if self.bits not in range(1, 9):
            raise ValueError(f"bits={self.bits}; use 1 to 8")

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The centroids m of each group of channels."""
        return {"centroids": ((geometry.width // self.channels, 2**self.bits, self.channels), torch.float16)}

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """The packed codes of every token, alone."""
        if geometry.head_size % self.channels:
            raise ValueError(f"coupled: channels={self.channels} does not divide head size {geometry.head_size}")
        return {"codes": ((rows, pack.packed_size(width // self.channels, self.bits)), torch.uint8)}

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate rows of any float dtype, and find the nearest centroid of each group of channels."""
        x_NRGE = rotate(x_NRW, rotation).float().unflatten(-1, (-1, self.channels))
        groups = zip(x_NRGE.flatten(0, 1).unbind(1), tensors["centroids"].float(), strict=True)
        codes = torch.stack([grid.scan(x_NE.contiguous(), centroids_KE) for x_NE, centroids_KE in groups], 1)
        return {"codes": pack.pack(codes.view(x_NRGE.shape[:-1]), self.bits)}

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [N, R, W]."""
        codes = pack.unpack(fields["codes"], self.bits, width // self.channels).int()
        first_G = torch.arange(0, codes.shape[-1] << self.bits, 1 << self.bits, dtype=torch.int32, device=codes.device)
        points = tensors["centroids"].float().flatten(0, 1).index_select(0, (codes + first_G).flatten())
        return points.view(*codes.shape[:-1], width)


@dataclass(frozen=True)
class Nuq(Quantizer):
    """Encode to `bits` per element; to be used with `correct: sparse`, which stores the outliers.

    bits      1 to 8
    scale     "channel": calibrated ends of every channel · "token": the ends of each token
    covered   of scale "channel": the share of a channel's elements that its ends enclose

        u = (x - middle) / half, so that what is not an outlier lies in [-1, 1];    x̂ = middle + half · point

    The ends middle ± half belong to a channel, calibrated, and cost nothing per token; or to a token, and are stored.

    Source: Hooper et al., 2024 (KVQuant), sections 3.1 (per channel, before RoPE), 3.3 (nuq) and 3.4.
    Differs: k-means is not weighted by Fisher information, which needs a backward pass through the whole model; the
    points are not shifted and stretched to keep the mean and deviation of what they encode (Q-Norm).
    """

    kind: ClassVar[str] = "nuq"
    papers: ClassVar[tuple[str, ...]] = ("2401.18079",)
    slack: ClassVar[float] = 1.6  # calibrated ends cut what the calibration had not seen
    fitted: ClassVar[bool] = True
    bits: int = 3
    scale: Literal["channel", "token"] = "token"
    covered: float = 0.99

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in range(1, 9):
            raise ValueError(f"bits={self.bits}; use 1 to 8")
        if not 0.5 <= self.covered <= 1:
            raise ValueError(f"covered={self.covered}; use 0.5 to 1")

    def check(self, site: Site) -> None:
        if site.scheme.rotate:
            raise ValueError("nuq takes channels as they are; use it without rotate")
        super().check(site)

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Rising points in [-1, 1], and the ends of channels."""
        found = {"points": ((2**self.bits,), torch.float32)}
        if self.scale == "channel":
            found |= {name: ((geometry.width,), torch.float32) for name in ("middle", "half")}
        return found

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        codes = {"codes": ((rows, pack.packed_size(width, self.bits)), torch.uint8)}
        ends = {name: ((rows,), torch.float16) for name in ("middle", "half")}
        return codes | (ends if self.scale == "token" else {})

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate and encode rows [N, R, W] of any float dtype; `tensors` are those of `specs`."""
        x_NRW, stored = rotate(x_NRW, rotation), {}
        if self.scale == "token":
            stored = {name: end.half() for name, end in zip(("middle", "half"), ends(x_NRW), strict=True)}
        points = tensors["points"]
        boundaries = (points[1:] + points[:-1]) / 2
        u_NRW = normalized(x_NRW, *_ends(stored or tensors, self.scale))
        codes = torch.bucketize(u_NRW.contiguous(), boundaries)
        return {"codes": pack.pack(codes, self.bits)} | stored

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [N, R, W]."""
        codes = pack.unpack(fields["codes"], self.bits, width)
        middle, half = _ends(fields if self.scale == "token" else tensors, self.scale)
        x = tensors["points"].index_select(0, codes.flatten().int()).view(codes.shape)
        return x.mul_(half).add_(middle)


def ends(x_NRW: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half of the range of every row, [N, R]."""
    low, high = x_NRW.aminmax(dim=-1)
    return (low + high) / 2, (high - low) / 2


def normalized(x: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """Elements as multiples of the half range about its middle; 0 where there is no range."""
    return (x - middle) * product.inverse(half)


def _ends(given: Tensors, scale: str) -> list[Tensor]:
    found = [given[name].float() for name in ("middle", "half")]
    return [end[..., None] for end in found] if scale == "token" else found
