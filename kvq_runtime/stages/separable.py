"""Quantize per token after every channel was divided by a scale of its own: ZipCache's channel-separable tokenwise
quantization.

    c_i = √max_t |x_ti|        x̂_ti = c_i · (low_t + step_t · code_ti),    codes are those of x_ti / c_i

A channel that is n times louder than the others, in all tokens, widens the range of every token √n times instead of n
times. Beside the codes only a step and a low end per token are stored: no groups.

Source: He et al., 2024 (ZipCache), channel-separable tokenwise quantization.
Differs: c is calibrated, once for all prompts (theirs is taken from each prompt, as with the policy `first_tokens`), so
that no field belongs to a whole block, generated tokens are encoded with it too, and single tokens can be decoded.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors


@dataclass(frozen=True)
class Separable(Quantizer):
    """Round to `bits` in groups of a token's channels, each channel over its scale.

    bits    1, 2, 3, 4 or 8
    group   channels per step and low end: "all" (up to 1024), the paper's whole token; "head", or a number
    range   "minmax": step and low end per group; "absmax": symmetric, a step alone
    """

    kind: ClassVar[str] = "separable"
    fitted: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    bits: int = 2
    group: str | int = "all"
    range: Literal["minmax", "absmax"] = "minmax"

    def __post_init__(self):
        _ = self.rounding  # whose settings they are

    @property
    def rounding(self) -> Rtn:
        """The rounding of a token once its channels are divided."""
        return Rtn(self.bits, self.group, self.range)

    def check_prompt_fit(self) -> None:
        """Allow it: the tokens of one row have a maximum: the paper's own way."""

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the scale c of each channel, over 0."""
        return {"scale": ((geometry.width,), torch.float32)}

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """Packed codes, step and low end of every token; the token comes first in each."""
        return self.rounding.fields(rows, width, geometry, dtype)

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate rows of any float dtype, divide their channels, and round: the fields, [N, R, W/group, ...] each."""
        return self.rounding.encode(rotate(x_NRW, rotation) / tensors["scale"], None, NOTHING, geometry)

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [N, R, W], into `out` if it is given."""
        return self.rounding.decode(fields, width, geometry, NOTHING, out).mul_(tensors["scale"])
