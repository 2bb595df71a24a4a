"""Token-wise fallback: store tokens that a quantizer with static ranges cannot represent once more, in 8 bits.

A token is a candidate when its squared error, summed over channels, exceeds the calibrated bound. A block has a fixed
number of slots; if candidates outnumber them, the largest errors win. The number of candidates is stored, so that a
rising rate can be seen. Copies that fill the slots of padding or exact sinks are candidates like their original; ties
go to the last, so never to a copy.

What a slot costs, 8 bits / block per element, is billed whether it is used or not: shapes are the same for all blocks.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rtn
from kvq_runtime.stages.stage import Correction, Fields, Site, Specs, Tensors

BITS = 8


@dataclass(frozen=True)
class Escape(Correction):
    """Store up to `slots` tokens of a block by plain rounding in 8 bits, all channels of a token in one group.

    limit   a token is a candidate when its error is this many times the mean error of the calibration's tokens
    """

    kind: ClassVar[str] = "escape"
    fitted: ClassVar[bool] = True
    slots: int = 1
    limit: float = 8.0

    def __post_init__(self):
        if not 1 <= self.slots <= 128:
            raise ValueError(f"slots={self.slots}; use 1 to 128")
        if not 1 < self.limit < 1e6:
            raise ValueError(f"limit={self.limit}; use more than 1 and less than 1000000")

    def check(self, site: Site) -> None:
        if site.scheme.axis != "token" or site.window.block > 32767:
            raise ValueError('escape needs axis "token" and blocks below 32768')

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The fitted bound: a token's squared error, float32 [1]."""
        return {"bound": ((1,), torch.float32)}

    def memory_kind(self, field: str) -> str:
        return "escapes"

    def fields(self, block: int, geometry: Geometry) -> Specs:
        """The fields of a block beside the quantizer's; a place of -1 is an unused slot."""
        return {
            "escape_codes": ((self.slots, geometry.width), torch.uint8),
            "escape_step": ((self.slots,), torch.float16),
            "escape_low": ((self.slots,), torch.float16),
            "escape_place": ((self.slots,), torch.int16),
            "escape_wanted": ((1,), torch.int16),
        }

    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Choose tokens of blocks by the error x - `rounded`, and encode them."""
        error_NT = (x_NTC - rounded_NTC.float()).square().sum(-1)
        wants_NT = error_NT > tensors["bound"]
        last = x_NTC.shape[1] - 1
        worst = last - error_NT.flip(1).sort(dim=1, descending=True, stable=True).indices[:, : self.slots]
        worst = torch.nn.functional.pad(worst, (0, self.slots - worst.shape[1]))
        place = torch.where(wants_NT.gather(1, worst), worst, -1)
        place = place.where(torch.arange(self.slots, device=place.device) <= last, -1)
        chosen = x_NTC.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, x_NTC.shape[-1]))
        codes, step, low = rtn.encode(chosen.where(place[..., None] >= 0, 0.0), BITS)
        wanted = wants_NT.sum(1, keepdim=True)
        fields = {"codes": codes, "step": step, "low": low}
        fields |= {"place": place.to(torch.int16), "wanted": wanted.to(torch.int16)}
        return {f"escape_{name}": field for name, field in fields.items()}

    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Replace the escaped tokens by their 8-bit values, in the same tensor."""
        blocks, slots = (fields["escape_place"] >= 0).nonzero(as_tuple=True)
        if len(blocks):
            part = [fields[f"escape_{name}"][blocks, slots] for name in ("codes", "step", "low", "place")]
            rounded_NTC[blocks, part[3].long()] = rtn.decode(part[0], part[1], part[2], BITS).to(rounded_NTC.dtype)
        return rounded_NTC

    def count(self, fields: Fields) -> tuple[int, int]:
        """(tokens stored in slots, candidates) of these blocks."""
        return int((fields["escape_place"] >= 0).sum()), int(fields["escape_wanted"].sum())
