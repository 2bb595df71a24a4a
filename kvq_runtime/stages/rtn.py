"""Quantize by plain rounding between the ends of a group: KIVI's, Quanto's and QuaRot's quantizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import lookup, pack, rtn
from kvq_runtime.stages import groups


@dataclass(frozen=True)
class Rtn:
    """Round to `bits` in groups.

    bits    1, 2, 3, 4 or 8
    group   channels per group where the side works per token, tokens where it works per channel; or "all", "head"
    range   "minmax": step and low end per group; "absmax": symmetric, a step alone
    """

    kind: ClassVar[str] = "rtn"
    bits: int = 2
    group: str | int = 64
    range: Literal["minmax", "absmax"] = "minmax"

    def __post_init__(self):
        groups.check(self.group)
        if self.bits not in (1, 2, 3, 4, 8):
            raise ValueError(f"bits={self.bits}; use 1, 2, 3, 4 or 8")
        if self.range not in ("minmax", "absmax"):
            raise ValueError(f'range={self.range!r}; use "minmax" or "absmax"')

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size = groups.size(self.group, width, geometry)
        fields = {
            "codes": ((rows, width // size, pack.packed_size(size, self.bits)), torch.uint8),
            "step": ((rows, width // size), torch.float16),
        }
        return fields | ({"low": fields["step"]} if self.range == "minmax" else {})

    def encode(self, x_NRW: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        x = x_NRW.unflatten(-1, (-1, groups.size(self.group, x_NRW.shape[-1], geometry)))
        encoded = rtn.encode_minmax(x, self.bits) if self.range == "minmax" else rtn.encode_absmax(x, self.bits)
        fields = dict(zip(("codes", "step", "low"), encoded, strict=False))
        return fields | {"codes": pack.pack(fields["codes"], self.bits)}

    def decode(self, fields: dict[str, Tensor], width: int, geometry: Geometry, out: Tensor | None = None) -> Tensor:
        """Decode to float32 [..., rows, width], into `out` if it is given."""
        size = groups.size(self.group, width, geometry)
        codes = pack.unpack(fields["codes"], self.bits, size)
        room = None if out is None else out.unflatten(-1, codes.shape[-2:])
        x = rtn.decode(codes, fields["step"], fields.get("low"), self.bits, room)
        return x.flatten(-2) if out is None else out

    def reader(self, width: int, geometry: Geometry, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What makes codes what a group's step multiplies: float32, a row's elements in the order of `values_order`."""
        size, zero = groups.size(self.group, width, geometry), self._zero
        if self._together(size) == 1:
            return lambda codes: pack.unpack(codes, self.bits, size).float() - zero
        return partial(lookup.take, _table(self.bits, zero, device), dtype=torch.float32)

    def ends(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Step and low end of the groups; None where it is zero."""
        return fields["step"], fields.get("low")

    @property
    def _zero(self) -> float:
        """The code, or the place between two, that stands for the low end, or for 0."""
        return 0 if self.range == "minmax" else (2**self.bits - 1) / 2

    def values_order(self, width: int, geometry: Geometry) -> Tensor:
        """The natural place, inside its group, of each element that `reader` gives."""
        size = groups.size(self.group, width, geometry)
        return torch.arange(size).view(self._together(size), -1).mT.flatten()

    def _together(self, size: int) -> int:
        """How many codes one lookup gives: all of a byte, where they fill it and are a word together."""
        return 8 // self.bits if self.bits in (2, 4) and size % (8 // self.bits) == 0 else 1

    def order(self, width: int, geometry: Geometry) -> Tensor:
        """Where each decoded element belongs: rounding keeps the natural order."""
        groups.size(self.group, width, geometry)
        return torch.arange(width)


@lru_cache(maxsize=8)
def _table(bits: int, zero: float, device: torch.device) -> Tensor:
    """The codes of every byte, less `zero`."""
    byte = torch.arange(256, device=device)
    codes = torch.stack([(byte >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 1)
    return lookup.table(codes.float() - zero)


KINDS = (Rtn,)
