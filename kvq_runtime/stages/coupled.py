"""Quantize neighbouring channels together, to the nearest of a codebook of their own: CQ's coupled quantization.

    code of group g = argmin_k |x_g - m_gk|²        x̂_g = m_gk

Channels of a token depend on each other, so that their joint entropy is below the sum of their own: one code of b bits
for c channels loses less than c codes of b / c bits. Nothing is stored of a token but its codes; the codebooks, of
2^b points for each group of c channels, are calibrated, once for all prompts.

Source: Zhang et al., 2024 (CQ, arXiv 2405.03917), sections 3.2 and 3.3.
Differs: centroids are rounded to float16, and points are not weighted by Fisher information, see the fit.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import grid, pack
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors


@dataclass(frozen=True)
class Coupled(Quantizer):
    """Encode `channels` neighbouring channels of a token by one code.

    channels   how many are coupled; divides the head size
    bits       of a code, 1 to 8: bits / channels for each element
    """

    kind: ClassVar[str] = "coupled"
    papers: ClassVar[tuple[str, ...]] = ("2405.03917",)
    fitted: ClassVar[bool] = True
    slack: ClassVar[float] = 2.5  # a codebook of as few tokens as it has centroids
    channels: int = 4
    bits: int = 8

    def __post_init__(self):
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
