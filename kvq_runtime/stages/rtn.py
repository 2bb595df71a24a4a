"""Quantize by plain rounding between the ends of a group: KIVI's, Quanto's and QuaRot's quantizer."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import lookup, pack, rtn
from kvq_runtime.ops.rotation import Rotation, in_tile
from kvq_runtime.stages import groups
from kvq_runtime.stages.abilities import PackedCodes
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Scheme, Tensors


@dataclass(frozen=True)
class Rtn(Quantizer):
    """Round to `bits` in groups.

    bits    1, 2, 3, 4 or 8
    group   channels per group where the scheme works per token, tokens where it works per channel; or "all", "head"
    range   "minmax": step and low end per group; "absmax": symmetric, a step alone
    """

    kind: ClassVar[str] = "rtn"
    slack: ClassVar[float] = 1.6  # uniform steps from a group's least number to its largest
    kernel: ClassVar[str | None] = "uniform"
    bits: int = 2
    group: str | int = 64
    range: Literal["minmax", "absmax"] = "minmax"

    def __post_init__(self):
        groups.check(self.group)
        if self.bits not in (1, 2, 3, 4, 8):
            raise ValueError(f"bits={self.bits}; use 1, 2, 3, 4 or 8")
        if self.range not in ("minmax", "absmax"):
            raise ValueError(f'range={self.range!r}; use "minmax" or "absmax"')

    def papers_in(self, scheme: Scheme) -> tuple[str, ...]:
        """By channel it is KIVI's, after a Hadamard QuaRot's; else it is general knowledge."""
        by_channel, turned = scheme.axis == "channel", scheme.rotate is not None and scheme.rotate.kind == "hadamard"
        return ("2402.02750",) * by_channel + ("2404.00456",) * turned

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size = groups.size(self.group, width, geometry)
        fields = {
            "codes": ((rows, width // size, pack.packed_size(size, self.bits)), torch.uint8),
            "step": ((rows, width // size), torch.float16),
        }
        return fields | ({"low": fields["step"]} if self.range == "minmax" else {})

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: the fields, [N, R, W/group, ...] each."""
        x = x_NRW.unflatten(-1, (-1, groups.size(self.group, x_NRW.shape[-1], geometry)))
        encoded = rtn.encode(x, self.bits, self.range, rotation)
        return dict(zip(("codes", "step", "low"), encoded, strict=False))

    def one_launch(self, rotation: Rotation, width: int, geometry: Geometry) -> bool:
        """True if a kernel rotates, rounds and packs rows of `width` in one launch."""
        return in_tile(rotation, groups.size(self.group, width, geometry))

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [..., rows, width], into `out` if not None."""
        size = groups.size(self.group, width, geometry)
        codes = pack.unpack(fields["codes"], self.bits, size)
        room = None if out is None else out.unflatten(-1, codes.shape[-2:])
        x = rtn.decode(codes, fields["step"], fields.get("low"), self.bits, room)
        return x.flatten(-2) if out is None else out

    def packed(self, width: int, geometry: Geometry, device: torch.device) -> PackedCodes:
        """Codes less their zero, times the step, plus the low end; all codes of a byte at once where that is a word."""
        size, zero = self.group_size(width, geometry), self._zero
        together = lookup.together(size, self.bits)
        order = lookup.order(size, together)

        def ends(fields: Fields) -> tuple[Tensor, Tensor | None]:
            return fields["step"], fields.get("low")

        if together == 1:
            return PackedCodes(size, lambda codes: pack.unpack(codes, self.bits, size).float() - zero, ends, order)
        read = partial(lookup.take, _table(self.bits, zero, device), dtype=torch.float32)
        return PackedCodes(size, read, ends, order)

    def group_size(self, width: int, geometry: Geometry) -> int:
        return groups.size(self.group, width, geometry)

    @property
    def _zero(self) -> float:
        """The code, possibly between two, that decodes to the low end, or to 0."""
        return 0 if self.range == "minmax" else (2**self.bits - 1) / 2


@lru_cache(maxsize=8)
def _table(bits: int, zero: float, device: torch.device) -> Tensor:
    """The codes of every byte, less `zero`."""
    return lookup.table(lookup.codes_of_bytes(bits, device).float() - zero)
