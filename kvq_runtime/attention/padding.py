"""Padding on the left, as kernels take it: where each row's first real token is."""

import torch

from kvq_runtime.store.positions import Positions


class LeftPadding:
    """Each row's first real slot, int32 [B], in memory that stays where it is.

    real      whether all slots after it are real
    counted   whether positions count from it
    """

    def __init__(self, positions: Positions):
        self.positions = positions
        self.starts_B = torch.empty(0)
        self.forget()

    def forget(self) -> None:
        """Look again before the next attention: rows or tokens are others."""
        self._length, self.real, self.counted = -1, False, False

    def look(self, batch: int, count: int, device: torch.device) -> bool:
        """Find the starts, once in a pass, and not while steps announce no padding; whether they are others."""
        length, last = self.positions.length, self._length
        self._length = length
        if length == last or (length == last + 1 and count == 1 and not self.positions.told):
            return False
        with torch.inference_mode(False):
            starts_B, self.real, self.counted = self.positions.starts(batch, device)
        if len(self.starts_B) != batch:
            self.starts_B = starts_B
        else:
            self.starts_B.copy_(starts_B)
        return True
