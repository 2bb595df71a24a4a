"""Quantize by angles: PolarQuant's recursive polar transform, with a codebook for the angles of each level.

polar          from the exact density that angles have after a random rotation
polar_fitted   from the calibration's own angles
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, check_group
from kvq_runtime.ops import pack, polar
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors


@dataclass(frozen=True)
class Polar(Quantizer):
    """Encode a vector as angles and radii; to be used after a rotation of the whole vector.

    bits     of the angles of level 1 (2 to 6), 2, 3, ... (1 to 4); the last is that of all further levels
    levels   of the transform; a radius is stored per 2^levels elements. 0: as many as the vector has, one radius each,
             for which its size has to be a power of two
    group    the vector: "head", "all", or a number of elements
    radius   what a radius is stored as: "fp16"
    points   what an angle decodes to: "unit" (cos, sin) of its centroid, the paper's, which keeps norms;
             "mean" the mean of (cos, sin) over its cell, which has the least squared error

    Radii are stored as root mean squares, whose range fits float16.

    Source: Han et al., 2025 (PolarQuant), section 4.1: levels=4, bits=(4, 2), 62 bits per 16 elements.
    Differs: levels=0 and points="mean" are ours.
    """

    kind: ClassVar[str] = "polar"
    by_token: ClassVar[bool] = True
    one_launch: ClassVar[bool] = True
    kernel: ClassVar[str | None] = "polar"
    bits: tuple[int, ...] = (4, 2)
    levels: int = 4
    group: str | int = "head"
    radius: Literal["fp16"] = "fp16"
    points: Literal["unit", "mean"] = "unit"

    def __post_init__(self):
        super().__post_init__()
        check_group(self.group)
        object.__setattr__(self, "bits", tuple(self.bits))
        if not 0 <= self.levels <= 10 or not 1 <= len(self.bits) <= (self.levels or 10):
            settings = f"bits={list(self.bits)} levels={self.levels}"
            raise ValueError(f"{settings}; use 0 to 10 levels, and at least one width but no more than levels")
        for level, width in enumerate((*self.bits, self.bits[-1])[: self.levels or None], start=1):
            polar.check(level, width)

    def sizes(self, width: int, geometry: Geometry) -> tuple[int, tuple[int, ...]]:
        """Elements of a vector, and the bits of each level."""
        size = geometry.group_size(self.group, width)
        levels = self.levels or size.bit_length() - 1
        if size % 2**levels:
            fit = f"a multiple of {2**levels}" if self.levels else "a power of two, or levels=4 and a radius per 16"
            raise ValueError(f"polar: levels={self.levels} does not fit a vector of {size} elements; use {fit}")
        if levels < 1:
            raise ValueError(f"polar: a vector of {size} elements has no angle; use at least 2")
        return size, (*self.bits, *self.bits[-1:] * levels)[:levels]

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size, bits = self.sizes(width, geometry)
        count = width // size
        codes = sum(pack.packed_size(sum(counts), wide) for wide, counts in polar.runs(size, bits))
        return {
            "codes": ((rows, count, codes), torch.uint8),
            "radius": ((rows, count, size >> len(bits)), torch.float16),
        }

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: the fields, [N, R, W/group, ...] each."""
        size, bits = self.sizes(x_NRW.shape[-1], geometry)
        x, boundaries = x_NRW.unflatten(-1, (-1, size)), self._boundaries(bits, tensors)
        codes, radius = polar.encode(x, bits, rotation, boundaries)
        return {"codes": codes, "radius": radius}

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        size, bits = self.sizes(width, geometry)
        codes, start = [], 0
        for wide, counts in polar.runs(size, bits):
            stop = start + pack.packed_size(sum(counts), wide)
            run = pack.unpack(fields["codes"][..., start:stop], wide, sum(counts))
            codes += run.split(counts, -1)
            start = stop
        radii = fields["radius"].float() * 2 ** (len(bits) / 2)
        return polar.decode(codes, radii, self.points_of(bits, tensors, radii.device)).flatten(-2)

    def _boundaries(self, bits: tuple[int, ...], tensors: Tensors) -> Sequence[Tensor] | None:
        """Return the boundaries of the angles of each level, [2^bits - 1]; None: those of the exact density."""
        return None

    def points_of(self, bits: tuple[int, ...], tensors: Tensors, device: torch.device) -> list[Tensor]:
        """(cos, sin) that every code decodes to, of every level, float32 [codes, 2]."""
        return [polar.points_on(device, level, wide, self.points) for level, wide in enumerate(bits, start=1)]


@dataclass(frozen=True)
class PolarFitted(Polar):
    """The same with a codebook for each level from the angles of the calibration: without a rotation
    the density of angles is not known beforehand.

    A level has one codebook for all its angles, of all heads of a scheme.

    Source: Han et al., 2025 (PolarQuant), algorithm 1, line 3 and section 4.1 (offline 1-D k-means++).
    """

    kind: ClassVar[str] = "polar_fitted"
    fitted: ClassVar[bool] = True

    def check_prompt_fit(self) -> None:
        """Allow it: a row's own tokens have angles."""

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the codebooks, level after level: boundaries inside the range, and what a code decodes to."""
        counts = [2**wide for wide in self.sizes(geometry.width, geometry)[1]]
        return {
            "boundaries": ((sum(counts) - len(counts),), torch.float32),
            "points": ((sum(counts), 2), torch.float32),
        }

    def _boundaries(self, bits: tuple[int, ...], tensors: Tensors) -> Sequence[Tensor]:
        return tensors["boundaries"].split([2**wide - 1 for wide in bits])

    def points_of(self, bits: tuple[int, ...], tensors: Tensors, device: torch.device) -> list[Tensor]:
        return list(tensors["points"].split([2**wide for wide in bits]))
