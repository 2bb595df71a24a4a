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
        """Look again before the next attention: rows or tokens have changed."""
        self._length, self.real, self.counted = -1, False, False

    @property
    def forgotten(self) -> bool:
        """True if `look` has not been called since `forget`."""
        return self._length < 0

    def look(self, batch: int, count: int, device: torch.device) -> bool:
        """Find the starts, once in a pass, and not while steps bring no padding; True if they may have changed.

        A step that announces nothing brings none; of one that does, the newest slot alone is looked at.
        """
        positions, last = self.positions, self._length
        self._length = positions.length
        step = self._length == last + 1 and count == 1
        if self._length == last or (step and not positions.told):
            return False
        if step and self.real and positions.goes_on(self.starts_B, self.counted):
            return False
        with torch.inference_mode(False):
            starts_B, self.real, self.counted = positions.starts(batch, device)
        if len(self.starts_B) != batch:
            self.starts_B = starts_B
        else:
            self.starts_B.copy_(starts_B)
        return True
