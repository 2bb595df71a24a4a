"""Quantize by the nearest point of a grid that is optimal for Gaussian vectors: HIGGS's quantizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import grid, lookup, pack
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages import groups
from kvq_runtime.stages.codebook import CodebookQuantizer


@dataclass(frozen=True)
class Grid(CodebookQuantizer):
    """Encode `dim` elements by one of `size` points, log2(size)/dim bits per element, with one scale per group.

    dim, size   2 with 16, 64 or 256 (2, 3, 4 bits); 4 with 64 or 256 (1.5, 2 bits); 8 with 256 (1 bit)
    group       "all", "head", or elements per scale
    """

    kind: ClassVar[str] = "grid"
    papers: ClassVar[tuple[str, ...]] = ("2411.17525",)
    kernel: ClassVar[str | None] = "grid"
    dim: int = 2
    size: int = 16
    group: str | int = "all"

    def __post_init__(self):
        groups.check(self.group)
        if (self.dim, self.size) not in grid.DIGESTS:
            raise ValueError(f"no grid with dim={self.dim} size={self.size}; there are {sorted(grid.DIGESTS)}")

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.size.bit_length() - 1

    def _group(self, width: int, geometry: Geometry) -> int:
        size = groups.size(self.group, width, geometry)
        if size % self.dim:
            raise ValueError(f"grid: a group of {size} elements is no multiple of dim={self.dim}")
        return size

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size = self._group(width, geometry)
        return {
            "codes": ((rows, width // size, pack.packed_size(size // self.dim, self.bits)), torch.uint8),
            "scale": ((rows, width // size), torch.float16),
        }

    def encode(
        self, x_NRW: Tensor, rotation: Rotation, tensors: Mapping[str, Tensor], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: the fields, [N, R, W/group, ...] each."""
        x = x_NRW.unflatten(-1, (-1, self._group(x_NRW.shape[-1], geometry)))
        codes, scale = grid.encode(x, self.dim, self.size, rotation)
        return {"codes": codes, "scale": scale}

    def _reader(
        self, width: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """One gather gives d elements, or 2 d where a byte holds two codes."""
        count = self._group(width, geometry) // self.dim
        paired = self._paired(count)
        read = partial(lookup.take, _table(self.dim, self.size, paired, dtype, device), dtype=dtype)
        return read if paired else lambda codes: read(pack.unpack(codes, self.bits, count))

    def order(self, width: int, geometry: Geometry) -> Tensor:
        """order[j] is the natural place, inside `width`, of the j-th decoded element."""
        size = self._group(width, geometry)
        count = size // self.dim
        code = torch.arange(count)
        if self._paired(count):
            code = code.view(2, -1).mT.flatten()
        inside = (code[:, None] + torch.arange(self.dim) * count).flatten()
        return (torch.arange(0, width, size)[:, None] + inside).flatten()

    def _paired(self, count: int) -> bool:
        """True if a byte holds two whole codes, so that one lookup serves both."""
        return self.bits == 4 and count % 2 == 0


@lru_cache(maxsize=32)
def _table(dim: int, size: int, paired: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The grid's points, or all pairs of them, rounded to bf16 whatever their dtype."""
    points = grid.points(dim, size).to(device, torch.bfloat16).to(dtype)
    if paired:
        points = torch.cat([points.repeat(size, 1), points.repeat_interleave(size, 0)], 1)
    return lookup.table(points)
