"""Copy activations between host memory and a GPU beside its work: page-locked memory, and a stream of its own.

Copies are done in the order in which they are asked for. PyTorch rounds page-locked memory up to a power of two bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coming:
    """A tensor on its way to the device; `arrived` is recorded behind its copy."""

    tensor: Tensor
    arrived: torch.cuda.Event

    def taken(self) -> Tensor:
        """The tensor, for work that is launched from now on."""
        stream = torch.cuda.current_stream(self.tensor.device)
        stream.wait_event(self.arrived)
        self.tensor.record_stream(stream)
        return self.tensor


class Copies:
    """The copies of one GPU."""

    def __init__(self, device: str | torch.device):
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def down(self, x: Tensor) -> Tensor:
        """Begin to copy to the host what the device is at work on, if need be; `settle` waits until it is there."""
        x = x.contiguous()
        host = _page_locked(x)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)
        return host

    def up(self, host: Tensor) -> Coming:
        """Begin to copy to the device."""
        with torch.cuda.stream(self._stream):
            tensor, arrived = host.to(self._device, non_blocking=True), torch.cuda.Event()
            arrived.record()
        return Coming(tensor, arrived)

    def settle(self) -> None:
        """Wait for all copies: the host may read what came down."""
        self._stream.synchronize()


def _page_locked(x: Tensor) -> Tensor:
    """Host memory for a tensor, page-locked unless the system allows no more of it: then copies are waited for."""
    try:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(x.shape, dtype=x.dtype)
