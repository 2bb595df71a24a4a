"""Quantize by a codebook that is known without a fit: a table lookup and one scale per group.

grid    nearest points of a grid that is optimal for Gaussian vectors: HIGGS's quantizer
lloyd   the Lloyd–Max codebook of a sphere's coordinates, element by element: TurboQuant's quantizer
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, check_group
from kvq_runtime.ops import grid, lloyd, pack, product
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import PackedCodes
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Specs, Tensors

Read = Callable[[Tensor], Tensor]


class Codebook(Quantizer):
    """A codebook of points of `dim` elements, with fields `codes` and `scale`.

    Code i of a group of n codes stands for its elements i, i + n, ...
    """

    one_launch: ClassVar[bool] = True
    has_lookup: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    bits: int
    dim: int
    group: str | int

    @abstractmethod
    def points(self, size: int) -> Tensor:
        """Return the points [2^bits, dim] for groups of `size` elements."""

    @abstractmethod
    def _encoded(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Codes and scales of groups [N, R, W/group, group]."""

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """Packed codes, and the scale of every group."""
        count = width // self.group_size(width, geometry)
        packed = pack.packed_size(width // count // self.dim, self.bits)
        return {"codes": ((rows, count, packed), torch.uint8), "scale": ((rows, count), torch.float16)}

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype."""
        x = x_NRW.unflatten(-1, (-1, self.group_size(x_NRW.shape[-1], geometry)))
        return dict(zip(("codes", "scale"), self._encoded(x, rotation), strict=True))

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [..., rows, width] in stored order (see `order`)."""
        return product.scaled(self.lookup(fields, width, geometry), fields["scale"])

    def lookup(self, fields: Fields, width: int, geometry: Geometry) -> Tensor:
        """Look codes up, bf16, without their scale."""
        read = self._reader(width, geometry, torch.bfloat16, fields["codes"].device)
        return read(fields["codes"]).view(*fields["scale"].shape[:-1], width)

    def packed(self, width: int, geometry: Geometry, device: torch.device) -> PackedCodes:
        """One lookup and one scale a group, no low end."""
        read = self._reader(width, geometry, torch.float32, device)
        return PackedCodes(self.group_size(width, geometry), read, lambda fields: (fields["scale"], None))

    def order(self, width: int, geometry: Geometry) -> Tensor:
        """order[j] is the natural place, inside `width`, of the j-th decoded element."""
        size = self.group_size(width, geometry)
        count = size // self.dim
        code = pack.order_together(count, pack.codes_together(count, self.bits))
        inside = (code[:, None] + torch.arange(self.dim) * count).flatten()
        return (torch.arange(0, width, size)[:, None] + inside).flatten()

    def _reader(self, width: int, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Read:
        """Return a function from codes to their elements without a scale, in stored order.

        One gather gives the elements of a code, or of all codes of a byte where they fill it.
        """
        size, bits = self.group_size(width, geometry), self.bits
        count = size // self.dim
        read = partial(pack.take, _table(self, size, dtype, device), dtype=dtype)
        return read if pack.codes_together(count, bits) > 1 else lambda codes: read(pack.unpack(codes, bits, count))


@constant(64)
def _table(quantize: Codebook, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of every index, rounded to bf16 whatever the dtype."""
    points = quantize.points(size).to(device, torch.bfloat16).to(dtype)
    if pack.codes_together(size // quantize.dim, quantize.bits) == 1:
        return pack.word_table(points)
    return pack.word_table(points[pack.codes_of_bytes(quantize.bits, device)].flatten(1))


@dataclass(frozen=True)
class Grid(Codebook):
    """Encode `dim` elements by one of `size` points, log2(size)/dim bits per element, with one scale per group.

    dim, size   2 with 16, 64 or 256 (2, 3, 4 bits); 4 with 64 or 256 (1.5, 2 bits); 8 with 256 (1 bit)
    group       "all", "head", or elements per scale
    """

    kind: ClassVar[str] = "grid"
    kernel: ClassVar[str | None] = "grid"
    dim: int = 2
    size: int = 16
    group: str | int = "all"

    def __post_init__(self):
        check_group(self.group)
        if (self.dim, self.size) not in grid.DIGESTS:
            raise ValueError(f"no grid with dim={self.dim} size={self.size}; there are {sorted(grid.DIGESTS)}")

    @property
    def bits(self) -> int:  # type: ignore[override]
        """Bits of one code."""
        return self.size.bit_length() - 1

    def group_size(self, width: int, geometry: Geometry) -> int:
        size = super().group_size(width, geometry)
        if size % self.dim:
            raise ValueError(f"grid: a group of {size} elements is no multiple of dim={self.dim}")
        return size

    def points(self, size: int) -> Tensor:
        return grid.points(self.dim, self.size)

    def _encoded(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return grid.encode(x, self.dim, self.size, rotation)


@dataclass(frozen=True)
class Lloyd(Codebook):
    """Encode to `bits` per element, with one scale per vector; to be used after a rotation of the whole vector.

    bits    1, 2, 3 or 4
    group   the vector: "head", "all", or a number of elements, at least 4
    scale   s of x̂ = s·c, where c are the centroids and ‖x‖/√K = rms the vector's own size:
            "plain" rms, the paper's · "norm" rms·√K/‖c‖, so that x̂ is as long as x · "least_squares" ⟨x,c⟩/⟨c,c⟩

    Source: Zandieh et al., 2025 (TurboQuant), algorithm 1; scales: Vargaftik et al., 2021 (DRIVE, arXiv 2105.08339) and
    2022 (EDEN, arXiv 2108.08842).
    Differs: no 1-bit sketch of the residual (their "prod" variant): its variance adds more error than the bias that it
    removes.
    """

    kind: ClassVar[str] = "lloyd"
    kernel: ClassVar[str | None] = "lloyd"
    dim: ClassVar[int] = 1
    bits: int = 2
    group: str | int = "head"
    scale: Literal["norm", "least_squares", "plain"] = "norm"

    def __post_init__(self):
        super().__post_init__()
        check_group(self.group)
        if self.bits not in lloyd.BITS:
            raise ValueError(f"bits={self.bits}; use 1, 2, 3 or 4")

    def group_size(self, width: int, geometry: Geometry) -> int:
        size = super().group_size(width, geometry)
        if size < 4:
            raise ValueError(f"lloyd: a vector of {size} elements; use at least 4")
        return size

    def points(self, size: int) -> Tensor:
        return lloyd.sphere(size, self.bits)[1][:, None]

    def _encoded(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return lloyd.encode(x, self.bits, self.scale, rotation)
