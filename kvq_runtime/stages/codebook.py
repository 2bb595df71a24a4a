"""Codebook quantizers: one table lookup and one scale per group, as `grid` and `lloyd` have."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rotation import Rotation, in_tile
from kvq_runtime.stages import groups
from kvq_runtime.stages.abilities import PackedCodes
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Tensors


class CodebookQuantizer(Quantizer):
    """A quantizer with fields `codes` and `scale`; how its codes are read is its own (`_reader`)."""

    group: str | int

    def one_launch(self, rotation: Rotation, width: int, geometry: Geometry) -> bool:
        """True if a kernel rotates, rounds and packs rows of `width` in one launch."""
        return in_tile(rotation, groups.size(self.group, width, geometry))

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [..., rows, width] in stored order (see `order`)."""
        return groups.scaled(self.lookup(fields, width, geometry), fields["scale"])

    def lookup(self, fields: Fields, width: int, geometry: Geometry) -> Tensor:
        """Look codes up, bf16, without their scale."""
        codes = fields["codes"]
        read = self._reader(width, geometry, torch.bfloat16, codes.device)
        return read(codes).view(*codes.shape[:-2], width)

    def packed(self, width: int, geometry: Geometry, device: torch.device) -> PackedCodes:
        """One lookup and one scale a group, no low end."""
        group = groups.size(self.group, width, geometry)
        read = self._reader(width, geometry, torch.float32, device)
        return PackedCodes(group, read, lambda fields: (fields["scale"], None))

    def group_size(self, width: int, geometry: Geometry) -> int:
        return groups.size(self.group, width, geometry)

    @abstractmethod
    def _reader(
        self, width: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from codes to their elements without a scale, in that dtype, in stored order."""
