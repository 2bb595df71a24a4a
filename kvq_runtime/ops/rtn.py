"""Round to nearest, in groups along the last dimension: uniform codes between a group's low and high end.

minmax  low = min, step = (max - min) / (2^b - 1);  code = round((x - low) / step);  x̂ = low + step · code
absmax  the same with low = -max|x| and step = 2 max|x| / (2^b - 1), so that the low end need not be stored

Step and low end are stored in float16 and the codes are chosen with the stored, rounded values. A constant group has
step 0 and decodes to its low end.

Source: Liu et al., 2024 (KIVI), equation 1; Quanto's affine rounding for minmax.
"""

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch


def _encode(x: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    inverse = torch.where(step > 0, 1 / step.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
    return ((x - low[..., None]) * inverse[..., None]).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


@dispatch.paired
def encode_minmax(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode float32 groups [..., K]: codes uint8 [..., K], step and low float16 [...]."""
    low, high = x.aminmax(dim=-1)
    low = low.half()
    step = ((high - low.float()).clamp_min_(0) / (2**bits - 1)).half()
    return _encode(x, low.float(), step.float(), bits), step, low


@dispatch.paired
def encode_absmax(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode float32 groups [..., K]: codes uint8 [..., K] and step float16 [...]; low is -step (2^b - 1) / 2."""
    step = (x.abs().amax(-1) * (2 / (2**bits - 1))).half()
    return _encode(x, step.float() * (-(2**bits - 1) / 2), step.float(), bits), step


@dispatch.paired
def decode(codes: Tensor, step: Tensor, low: Tensor | None, bits: int, out: Tensor | None = None) -> Tensor:
    """Decode uint8 codes [..., K] to float32; without `low` the group is symmetric (absmax)."""
    step = step.float()[..., None]
    start = step * (-(2**bits - 1) / 2) if low is None else low.float()[..., None]
    x = codes.float() if out is None else out.copy_(codes)
    return x.mul_(step).add_(start)  # addcmul with a broadcast factor is four times slower on a CPU
