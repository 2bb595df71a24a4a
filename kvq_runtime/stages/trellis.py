"""Quantize by the best path through a bitshift trellis: trellis-coded quantization, QTIP's codes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import trellis
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages import groups
from kvq_runtime.stages.codebook import CodebookQuantizer
from kvq_runtime.stages.stage import Fields

MEMORIES = (8, 10)


@dataclass(frozen=True)
class Trellis(CodebookQuantizer):
    """Encode to `bits` per element, each decoded from the last `memory` bits of its row, with one scale per group.

    bits     1, 2, 3 or 4
    memory   8 or 10: an element is one of 2^memory values; each two bits more take four times as long to encode
    group    "head", "all", or elements per scale; one path goes through all groups of a row
    """

    kind: ClassVar[str] = "trellis"
    papers: ClassVar[tuple[str, ...]] = ("2406.11235",)
    bits: int = 2
    memory: int = 10
    group: str | int = "head"

    def __post_init__(self):
        groups.check(self.group)
        known = sorted(pair for pair in trellis.DIGESTS if pair[1] in MEMORIES)
        if (self.bits, self.memory) not in known:
            raise ValueError(f"no trellis with bits={self.bits} memory={self.memory}; there are {known}")

    def one_launch(self, rotation: Rotation, width: int, geometry: Geometry) -> bool:
        """No kernel encodes it: the search for a path is torch's on every device."""
        return False

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size = groups.size(self.group, width, geometry)
        return {
            "codes": ((rows, trellis.packed_size(width, self.bits)), torch.uint8),
            "scale": ((rows, width // size), torch.float16),
        }

    def encode(
        self, x_NRW: Tensor, rotation: Rotation, tensors: Mapping[str, Tensor], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: codes [N, R, bytes], and scale [N, R, W/group]."""
        x = x_NRW.unflatten(-1, (-1, groups.size(self.group, x_NRW.shape[-1], geometry)))
        codes, scale = trellis.encode(x, self.bits, self.memory, rotation)
        return {"codes": codes, "scale": scale}

    def lookup(self, fields: Fields, width: int, geometry: Geometry) -> Tensor:
        """Look codes up, bf16, without their scale."""
        return self._reader(width, geometry, torch.bfloat16, fields["codes"].device)(fields["codes"])

    def _reader(
        self, width: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """A shift gives the index, the table the elements."""
        return partial(trellis.decode, bits=self.bits, memory=self.memory, count=width, dtype=dtype)
