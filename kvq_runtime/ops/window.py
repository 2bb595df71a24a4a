"""Append a step's keys and values to the exact window, whose end the counts on the device give."""

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch


@dispatch.paired("stored.append")
def append(k_BTC: Tensor, v_BTC: Tensor, window_2BWC: Tensor, counts: Tensor) -> None:
    """Write keys and values of T tokens behind the window's last, and count them.

    window_2BWC   the buffer of keys and values that the window is in, with room for them
    counts        int32 [4]: encoded blocks, the window's first place in the buffer, its tokens, which become T more,
                  and a number that is 0 between launches
    """
    places = counts[1:3].sum() + torch.arange(k_BTC.shape[1], device=counts.device)
    for window_BWC, x_BTC in zip(window_2BWC, (k_BTC, v_BTC), strict=True):
        window_BWC.index_copy_(1, places, x_BTC)
    counts[2:3].add_(k_BTC.shape[1])
