"""Quantize every element by the Lloyd–Max codebook of a sphere's coordinates: TurboQuant's quantizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import lloyd, lookup, pack
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages import groups
from kvq_runtime.stages.codebook import CodebookQuantizer


@dataclass(frozen=True)
class Lloyd(CodebookQuantizer):
    """Encode to `bits` per element, with one scale per vector; to be used after a rotation of the whole vector.

    bits    1, 2, 3 or 4
    group   the vector: "head", "all", or a number of elements, at least 4
    scale   s of x̂ = s·c, where c are the centroids and ‖x‖/√K = rms the vector's own size:
            "plain" rms, the paper's · "norm" rms·√K/‖c‖, so that x̂ is as long as x · "least_squares" ⟨x,c⟩/⟨c,c⟩

    Source: Zandieh et al., 2025 (TurboQuant), algorithm 1; scales: Vargaftik et al., 2021 and 2022 (DRIVE, EDEN).
    Differs: no 1-bit sketch of the residual (their "prod" variant): its variance adds more error than the bias that it
    removes.
    """

    kind: ClassVar[str] = "lloyd"
    papers: ClassVar[tuple[str, ...]] = ("2504.19874",)
    kernel: ClassVar[str | None] = "lloyd"
    bits: int = 2
    group: str | int = "head"
    scale: Literal["norm", "least_squares", "plain"] = "norm"

    def __post_init__(self):
        groups.check(self.group)
        if self.bits not in lloyd.BITS:
            raise ValueError(f"bits={self.bits}; use 1, 2, 3 or 4")
        if self.scale not in ("norm", "least_squares", "plain"):
            raise ValueError(f'scale={self.scale!r}; use "norm", "least_squares" or "plain"')

    def _group(self, width: int, geometry: Geometry) -> int:
        size = groups.size(self.group, width, geometry)
        if size < 4:
            raise ValueError(f"lloyd: a vector of {size} elements; use at least 4")
        return size

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size = self._group(width, geometry)
        return {
            "codes": ((rows, width // size, pack.packed_size(size, self.bits)), torch.uint8),
            "scale": ((rows, width // size), torch.float16),
        }

    def encode(
        self, x_NRW: Tensor, rotation: Rotation, tensors: Mapping[str, Tensor], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: the fields, [N, R, W/group, ...] each."""
        x = x_NRW.unflatten(-1, (-1, self._group(x_NRW.shape[-1], geometry)))
        codes, scale = lloyd.encode(x, self.bits, self.scale, rotation)
        return {"codes": codes, "scale": scale}

    def _reader(
        self, width: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """All codes of a byte are read by one index where they fill it."""
        size = self._group(width, geometry)
        together = lookup.together(size, self.bits)
        read = partial(lookup.take, _table(size, self.bits, together, dtype, device), dtype=dtype)
        return read if together > 1 else lambda codes: read(pack.unpack(codes, self.bits, size))

    def order(self, width: int, geometry: Geometry) -> Tensor:
        """order[j] is the natural place, inside `width`, of the j-th decoded element."""
        size = self._group(width, geometry)
        inside = lookup.order(size, lookup.together(size, self.bits))
        return (torch.arange(0, width, size)[:, None] + inside).flatten()


@lru_cache(maxsize=32)
def _table(size: int, bits: int, together: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of every index, rounded to bf16 whatever the dtype."""
    centroids = lloyd.sphere(size, bits)[1].to(device, torch.bfloat16).to(dtype)
    if together == 1:
        return lookup.table(centroids[:, None])
    return lookup.table(centroids[lookup.codes_of_bytes(bits, device)])
