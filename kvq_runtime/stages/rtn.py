"""Quantize by plain rounding, to evenly spaced levels.

rtn           between the ends of a group: KIVI's, Quanto's and QuaRot's quantizer
rtn_clipped   the same after a clip, of each group's largest magnitudes to an order statistic of them
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, check_group
from kvq_runtime.ops import pack, rtn
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import PackedCodes
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Specs, Tensors


@dataclass(frozen=True)
class Rtn(Quantizer):
    """Round to `bits` in groups.

    bits    1, 2, 3, 4 or 8
    group   channels per group where the scheme works per token, tokens where it works per channel; or "all", "head"
    range   "minmax": step and low end per group; "absmax": symmetric, a step alone
    """

    kind: ClassVar[str] = "rtn"
    by_token: ClassVar[bool] = True
    one_launch: ClassVar[bool] = True
    kernel: ClassVar[str | None] = "uniform"
    bits: int = 2
    group: str | int = 64
    range: Literal["minmax", "absmax"] = "minmax"

    def __post_init__(self):
        super().__post_init__()
        check_group(self.group)
        if self.bits not in (1, 2, 3, 4, 8):
            raise ValueError(f"bits={self.bits}; use 1, 2, 3, 4 or 8")

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """Packed codes, and the step and, of "minmax", the low end of every group."""
        size = self.group_size(width, geometry)
        fields: Specs = {
            "codes": ((rows, width // size, pack.packed_size(size, self.bits)), torch.uint8),
            "step": ((rows, width // size), torch.float16),
        }
        return fields | ({"low": fields["step"]} if self.range == "minmax" else {})

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: the fields, [N, R, W/group, ...] each."""
        x = x_NRW.unflatten(-1, (-1, self.group_size(x_NRW.shape[-1], geometry)))
        return dict(zip(("codes", "step", "low"), self._encoded(x, rotation), strict=False))

    def _encoded(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """Codes, steps and perhaps low ends of groups [N, R, W/group, group]."""
        return rtn.encode(x, self.bits, self.range, rotation)

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [..., rows, width], into `out` if not None."""
        codes = pack.unpack(fields["codes"], self.bits, width // fields["codes"].shape[-2])
        room = None if out is None else out.unflatten(-1, codes.shape[-2:])
        x = rtn.decode(codes, fields["step"], fields.get("low"), self.bits, room)
        return x.flatten(-2) if out is None else out

    def packed(self, width: int, geometry: Geometry, device: torch.device) -> PackedCodes:
        """Codes less their zero, times the step, plus the low end; all codes of a byte at once where that is a word."""
        size, zero = self.group_size(width, geometry), self._zero
        together = pack.codes_together(size, self.bits)
        order = pack.order_together(size, together)

        def ends(fields: Fields) -> tuple[Tensor, Tensor | None]:
            return fields["step"], fields.get("low")

        if together == 1:
            return PackedCodes(size, lambda codes: pack.unpack(codes, self.bits, size).float() - zero, ends, order)
        read = partial(pack.take, _table(self.bits, zero, device), dtype=torch.float32)
        return PackedCodes(size, read, ends, order)

    @property
    def _zero(self) -> float:
        """The code, possibly between two, that decodes to the low end, or to 0."""
        return 0 if self.range == "minmax" else (2**self.bits - 1) / 2


@constant(8)
def _table(bits: int, zero: float, device: torch.device) -> Tensor:
    """Return the codes of every byte, less `zero`."""
    return pack.word_table(pack.codes_of_bytes(bits, device).float() - zero)


@dataclass(frozen=True)
class Clipped(Rtn):
    """Round to `bits` in groups whose largest magnitudes are cut. No kernel clips: encoding takes several launches.

    keep   share of a group's magnitudes, in ascending order, below the one that all are cut to: of K elements the one
           with floor(keep · K) below it

    At 2 bits a finer step for the bulk of a group is worth more than its few largest elements.

    Source: Zhou et al., 2026 (OSCAR), the clipping thresholds; the authors' kernels take the order statistic.
    """

    kind: ClassVar[str] = "rtn_clipped"
    one_launch: ClassVar[bool] = False
    keep: float = 0.96

    def __post_init__(self):
        super().__post_init__()
        if not 0.5 <= self.keep < 1:
            raise ValueError(f"keep={self.keep}; use at least 0.5 and less than 1, or quantize by rtn")

    def _encoded(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        x = rotate(x, rotation)
        reach = x.abs().sort(-1).values[..., int(self.keep * x.shape[-1]), None]
        return rtn.encode(x.clamp(-reach, reach), self.bits, self.range)
