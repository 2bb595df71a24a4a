"""Round to nearest, in groups along the last dimension: uniform codes between a group's low and high end.

minmax  low = min, step = (max - min) / (2^b - 1);  code = round((x - low) / step);  x̂ = low + step · code
absmax  the same with low = -max|x| and step = 2 max|x| / (2^b - 1), so that the low end need not be stored

Step and low end are stored in float16 and the codes are chosen with the stored, rounded values. A constant group has
step 0 and decodes to its low end.

Source: Liu et al., 2024 (KIVI), equation 1; Quanto's affine rounding for minmax.
"""

from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch
from kvq_runtime.ops.pack import pack
from kvq_runtime.ops.rotation import Rotation, rotate

Range = Literal["minmax", "absmax"]


@dispatch.paired("groups.encode_rtn")
def encode(x: Tensor, bits: int, range: Range = "minmax", rotation: Rotation = None) -> tuple[Tensor, ...]:
    """Rotate groups [..., K] of any float dtype, and round them to codes of 1 to 8 bits.

    Returns packed codes uint8 [..., bytes], step float16 [...] and, of minmax, low float16 [...].
    """
    x = rotate(x, rotation)
    if range == "absmax":
        step = (x.abs().amax(-1) * (2 / (2**bits - 1))).half()
        return pack(_codes(x, step.float() * (-(2**bits - 1) / 2), step.float(), bits), bits), step
    low, high = x.aminmax(dim=-1)
    low = low.half()
    step = ((high - low.float()).clamp_min_(0) / (2**bits - 1)).half()
    return pack(_codes(x, low.float(), step.float(), bits), bits), step, low


def _codes(x: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., K] of groups with these ends, float32 [...]."""
    inverse = torch.where(step > 0, 1 / step.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
    return ((x - low[..., None]) * inverse[..., None]).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


@dispatch.paired("groups.decode_rtn")
def decode(codes: Tensor, step: Tensor, low: Tensor | None, bits: int, out: Tensor | None = None) -> Tensor:
    """Decode unpacked codes uint8 [..., K] to float32, into `out` if not None; without `low` the group is symmetric."""
    step = step.float()[..., None]
    start = step * (-(2**bits - 1) / 2) if low is None else low.float()[..., None]
    x = codes.float() if out is None else out.copy_(codes)
    return x.mul_(step).add_(start)  # addcmul with a broadcast factor is four times slower on a CPU
