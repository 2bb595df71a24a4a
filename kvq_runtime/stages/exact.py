"""Store as it came: the 16-bit cache, through the same machinery as every other recipe."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry


@dataclass(frozen=True)
class Exact:
    """Keep the model's own numbers, in the model's own dtype."""

    kind: ClassVar[str] = "exact"

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """One tensor in the model's dtype."""
        return {"x": ((rows, width), dtype)}

    def encode(self, x_NRW: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        return {"x": x_NRW}

    def decode(self, fields: dict[str, Tensor], width: int, geometry: Geometry) -> Tensor:
        return fields["x"]

    def order(self, width: int, geometry: Geometry) -> Tensor:
        return torch.arange(width)


KINDS = (Exact,)
