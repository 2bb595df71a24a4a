"""Keep the tokens of a block that is beyond its promise in few bits, with an error far below the promised one.

    uint8 [C, bytes]: of each channel a code for every token, of 1 to 8 bits, a step and a low end (`ops/rtn.py`)

The fewest bits are taken whose error is at most SHARE of the promise's bound. Where none are, or nothing is saved, the
tokens stay as they are, [block, C]. Sinks among a block's tokens are stored elsewhere, and not read here; the token
after them stands in their places, lest they widen steps.
"""

from functools import cache

import torch
from torch import Tensor

from kvq_runtime.ops import rtn
from kvq_runtime.ops.pack import packed_size, unpack
from kvq_runtime.store.promise import Promise, block_errors

SHARE = 1 / 8
ENDS = 4  # bytes of a step and a low end


@cache
def sizes(block: int) -> dict[int, int]:
    """The bits of a code by the bytes that a channel of a block takes, fewest first."""
    return dict(sorted({packed_size(block, bits) + ENDS: bits for bits in range(8, 0, -1)}.items()))


def encode(x_TC: Tensor, sinks: int, promise: Promise | None) -> Tensor:
    """What is kept of a block's tokens, on the CPU, the first of which are sinks; all of them, if nothing is known of
    a promise."""
    x_TC = x_TC.detach().cpu()
    if promise is None:
        return x_TC
    read_TC = torch.cat([x_TC[sinks : sinks + 1].expand(sinks, -1), x_TC[sinks:]]).float()
    for bits in sizes(len(x_TC)).values():
        codes, step_C, low_C = rtn.encode(read_TC.mT.contiguous(), bits)
        kept = torch.cat([codes, *(end_C[:, None].view(torch.uint8) for end_C in (step_C, low_C))], 1)
        error = float(block_errors((decode(kept, len(x_TC), x_TC.dtype) - read_TC)[None]))
        if kept.nbytes < x_TC.nbytes and error <= SHARE * promise.bound * promise.spread:
            return kept
    return x_TC


def decode(kept: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The tokens [block, C] of what is kept of them."""
    if kept.dtype != torch.uint8:
        return kept.to(dtype)
    bits = sizes(block)[kept.shape[1]]
    size = packed_size(block, bits)
    step_C, low_C = kept[:, size:].clone(memory_format=torch.contiguous_format).view(torch.float16).unbind(1)
    return rtn.decode(unpack(kept[:, :size], bits, block), step_C, low_C, bits).mT.to(dtype).contiguous()
