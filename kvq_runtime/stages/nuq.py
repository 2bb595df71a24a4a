"""Quantize to fitted points between the ends of a channel or a token: KVQuant's non-uniform datatype."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack, product
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors


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
    by_token: ClassVar[bool] = True
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
        specs = {"points": ((2**self.bits,), torch.float32)}
        if self.scale == "channel":
            specs |= {name: ((geometry.width,), torch.float32) for name in ("middle", "half")}
        return specs

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


def _ends(tensors: Tensors, scale: str) -> list[Tensor]:
    ends = [tensors[name].float() for name in ("middle", "half")]
    return [end[..., None] for end in ends] if scale == "token" else ends
