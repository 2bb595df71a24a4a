"""Store a matrix in 4-bit codes: what `storage="gptq4"` of a stage means, or "rtn4" of a vocabulary.

    w_io ≈ low + step · code        a step and a low end, float16, for each run of 64 inputs of an output

So a number takes 4.5 bits instead of 16. How a matrix is rounded is a matter of calibration: gptq4 against the Gram
matrix of its inputs (`kvq_calib/fit/gptq.py`), rtn4 to the nearest code (`kvq_calib/fit/fitted_codebook.py`).

I = inputs, the channels of what the matrix is multiplied with; O = outputs.
"""

from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.ops import pack, rtn
from kvq_runtime.stages.stage import Specs, Tensors

BITS = 4
GROUP = 64

Storage = Literal["bf16", "gptq4"]


def specs(inputs: int, outputs: int, prefix: str = "") -> Specs:
    """Names, shapes and dtypes of a packed matrix [I, O]."""
    groups = (outputs, -(-inputs // GROUP))
    codes = (*groups, pack.packed_size(min(GROUP, inputs), BITS))
    ends = {name: (groups, torch.float16) for name in ("step", "low")}
    return {f"{prefix}{name}": spec for name, spec in ({"codes": (codes, torch.uint8)} | ends).items()}


def unpacked(tensors: Tensors, inputs: int, prefix: str = "") -> Tensor:
    """The matrix, bfloat16 [I, O]."""
    return rows(tensors, inputs, slice(None), prefix).mT


def rows(tensors: Tensors, inputs: int, which: Tensor | slice, prefix: str = "") -> Tensor:
    """Some outputs of the matrix, bfloat16 [..., I]; only they are unpacked."""
    codes, step, low = (tensors[f"{prefix}{name}"][which] for name in ("codes", "step", "low"))
    found = rtn.decode(pack.unpack(codes, BITS, min(GROUP, inputs)), step, low, BITS)
    return found.flatten(-2)[..., :inputs].to(torch.bfloat16)
