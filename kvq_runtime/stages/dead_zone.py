"""Round latent channels by one step, with a dead zone: codes for files, where they are entropy-coded.

One step, in the unit in which errors cost alike, is the best rounding of all channels where codes take as many bits as
they say something: a channel that is smaller than the step becomes zeros, which cost next to nothing. That is reverse
water-filling, without choosing bits. A cache in memory takes a byte for each stored channel of a token, whatever the
target; files take the target (`kvq_runtime/entropy`).

Source: Cover and Thomas, 2006, section 10.3.3 (reverse water-filling); Gish and Pierce, 1968 (uniform steps are within
a quarter of a bit of all there can be); Sullivan, 1996 (dead zones).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import ladder
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors


@dataclass(frozen=True)
class DeadZone(Quantizer):
    """Round latent channels to multiples of a step.

    target     bits per element of codes in files, which the fit finds the step for; 0: `step` is what it is
    step       in the unit of the latents; 0: as `target` says
    channels   of the latents that are stored, the first ones; 0: all
    shared     the targets of all schemes that say so are one budget, of whole files, sinks and frames among it
               (`prefix/rate.py`), met by one step in the unit of the model's loss
    """

    kind: ClassVar[str] = "dead_zone"
    fitted: ClassVar[bool] = True
    takes_latents: ClassVar[bool] = True
    at_rest: ClassVar[tuple[str, ...]] = ("codes",)
    target: float = 0.0
    step: float = 0.0
    channels: int = 0
    shared: bool = False

    def __post_init__(self):
        if not 0 <= self.target <= ladder.MOST_BITS:
            raise ValueError(f"target={self.target}; use 0 to {ladder.MOST_BITS} bits")
        if not 0 <= self.step < float("inf") or self.channels < 0:
            raise ValueError(f"step={self.step}, channels={self.channels}; use numbers of at least 0")
        if self.shared and not self.target:
            raise ValueError("shared=True, but there is no target to share; give one")

    def stored(self, width: int) -> int:
        """R: how many latent channels are stored."""
        if self.channels > width:
            raise ValueError(f"channels={self.channels}; a token has {width}")
        return self.channels or width

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Of each stored channel the cell, the step but for loud ones, and its rung on the ladder of deviations."""
        count = (self.stored(geometry.width),)
        return {"cell": (count, torch.float32), "rung": (count, torch.uint8)}

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """A byte for each stored channel of each token, which comes first."""
        return {"codes": ((rows, self.stored(width)), torch.int8)}

    def encode(self, x_NTC: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate rows of any float dtype to R latent channels, by a basis [C, R], and round those."""
        return {"codes": ladder.encode(rotate(x_NTC, rotation), tensors["cell"], tensors["rung"])}

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [N, T, R]."""
        return ladder.decode(fields["codes"], tensors["cell"], tensors["rung"])
