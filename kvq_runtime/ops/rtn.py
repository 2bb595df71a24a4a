"""Round to nearest, in groups along the last dimension: uniform codes between a group's low and high end.

minmax  low = min, step = (max - min) / (2^b - 1);  code = round((x - low) / step);  x̂ = low + step · code
absmax  the same with low = -max|x| and step = 2 max|x| / (2^b - 1), so that the low end need not be stored

Step and low end are stored in float16 and the codes are chosen with the stored, rounded values. A constant group has
step 0 and decodes to its low end.

A matrix may be stored so in 4-bit codes: what `storage="gptq4"` of a stage means.

    w_io ≈ low + step · code        a step and a low end, float16, for each run of 64 inputs of an output

So a number takes 4.5 bits instead of 16. How a matrix is rounded is a matter of calibration: gptq4 against the Gram
matrix of its inputs (`kvq_calib/fit/predict.py`).
I = inputs, the channels of what the matrix is multiplied with; O = outputs.

Source: Liu et al., 2024 (KIVI), equation 1; Quanto's affine rounding for minmax.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch, product
from kvq_runtime.ops.pack import pack, packed_size, unpack
from kvq_runtime.ops.rotation import Rotation, rotate

Range = Literal["minmax", "absmax"]
MATRIX_BITS = 4
MATRIX_GROUP = 64
Storage = Literal["bf16", "gptq4"]  # of a stage's matrices


@dispatch.paired("groups.encode_rtn")
def encode(x: Tensor, bits: int, range: Range = "minmax", rotation: Rotation = None) -> tuple[Tensor, ...]:
    """Rotate groups [..., K] of any float dtype, and round them to codes of 1 to 8 bits.

    Returns packed codes uint8 [..., bytes], step float16 [...] and, of minmax, low float16 [...].
    """
    x = rotate(x, rotation)
    if range == "absmax":
        step = (x.abs().amax(-1) * (2 / (2**bits - 1))).half()
        return pack(coded(x, step.float() * (-(2**bits - 1) / 2), step.float(), bits), bits), step
    low, high = x.aminmax(dim=-1)
    low = low.half()
    step = ((high - low.float()).clamp_min_(0) / (2**bits - 1)).half()
    return pack(coded(x, low.float(), step.float(), bits), bits), step, low


def coded(x: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [..., K] of groups with these ends, float32 [...]; what is outside them is clipped."""
    return ((x - low[..., None]) * product.inverse(step)[..., None]).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def decode(codes: Tensor, step: Tensor, low: Tensor | None, bits: int, out: Tensor | None = None) -> Tensor:
    """Decode unpacked codes uint8 [..., K] to float32, into `out` if not None; without `low` the group is symmetric."""
    step = step.float()[..., None]
    start = step * (-(2**bits - 1) / 2) if low is None else low.float()[..., None]
    x = codes.float() if out is None else out.copy_(codes)
    return x.mul_(step).add_(start)  # addcmul with a broadcast factor is four times slower on a CPU


def matrix_specs(inputs: int, outputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return names, shapes and dtypes of a packed matrix [I, O]."""
    groups = (outputs, -(-inputs // MATRIX_GROUP))
    codes = (*groups, packed_size(min(MATRIX_GROUP, inputs), MATRIX_BITS))
    ends = {name: (groups, torch.float16) for name in ("step", "low")}
    return {"codes": (codes, torch.uint8)} | ends


def matrix(tensors: Mapping[str, Tensor], inputs: int) -> Tensor:
    """Return the matrix, bfloat16 [I, O]."""
    codes, step, low = (tensors[name] for name in ("codes", "step", "low"))
    decoded = decode(unpack(codes, MATRIX_BITS, min(MATRIX_GROUP, inputs)), step, low, MATRIX_BITS)
    return decoded.flatten(-2)[:, :inputs].to(torch.bfloat16).mT
