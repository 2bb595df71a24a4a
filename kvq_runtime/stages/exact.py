"""No quantization: the 16-bit cache, stored as every other recipe stores its blocks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Tensors


@dataclass(frozen=True)
class Exact(Quantizer):
    """Keep the model's own numbers, in the model's own dtype."""

    kind: ClassVar[str] = "exact"
    by_token: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = True

    def check(self, site: Site) -> None:
        scheme = site.scheme
        if scheme.rotate or scheme.predict or scheme.axis != "token":
            raise ValueError("exact keeps tokens as they are; drop predict, rotate and axis")
        if scheme.correct:
            raise ValueError("exact leaves nothing to correct; drop correct")
        super().check(site)

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """One tensor in the model's dtype."""
        return {"x": ((rows, width), dtype)}

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rows as they are, in their dtype; a recipe has no rotation here."""
        return {"x": x_NRW}

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        return fields["x"]
