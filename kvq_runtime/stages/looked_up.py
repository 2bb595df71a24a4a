"""Decode what one table lookup and one scale per group decode: what `grid` and `lloyd` have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages import groups


class LookedUp(ABC):
    """A quantizer with fields `codes` and `scale`; how its codes are read is its own (`_reader`)."""

    def decode(self, fields: Mapping[str, Tensor], width: int, geometry: Geometry) -> Tensor:
        """Decode to float32 [..., rows, width] in stored order (see `order`)."""
        return groups.scaled(self.lookup(fields, width, geometry), fields["scale"])

    def lookup(self, fields: Mapping[str, Tensor], width: int, geometry: Geometry) -> Tensor:
        """Look codes up, bf16, without their scale."""
        codes = fields["codes"]
        read = self._reader(width, geometry, torch.bfloat16, codes.device)
        return read(codes).view(*codes.shape[:-2], width)

    def reader(self, width: int, geometry: Geometry, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What makes codes what a group's scale multiplies: float32, a row's elements in stored order."""
        return self._reader(width, geometry, torch.float32, device)

    def ends(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, None]:
        """The scale of the groups, and no low end."""
        return fields["scale"], None

    @abstractmethod
    def _reader(
        self, width: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """What makes codes their elements without a scale, in that dtype, in stored order."""
