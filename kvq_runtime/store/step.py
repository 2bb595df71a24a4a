"""Undo a forward pass that fails, or stops midway: the cache is as if it had never been."""

from collections.abc import Callable
from typing import Any

import torch


class Step:
    """One forward pass over a cache, as a transaction.

    A caller that changes something registers first how to undo it; `undo` does so, last change first. After `commit`
    nothing is taken back any more.

    before   tokens of a row that the cache had seen
    count    tokens that every layer takes in, at least one
    batch    rows;   device   of the new keys and values
    taken    layers that have taken in their tokens;   done   those that have also encoded what was due
    """

    def __init__(self, before: int, count: int, batch: int, device: torch.device):
        self.before, self.count, self.batch, self.device = before, count, batch, device
        self.taken: set[int] = set()
        self.done: set[int] = set()
        self.open = True
        self._changes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def on_undo(self, restore: Callable[..., Any], *state: Any) -> None:
        """Call `restore(*state)` if the pass is undone. Tensors in `state` are held until it ends."""
        if self.open:
            self._changes.append((restore, state))

    def undo(self) -> None:
        """Take everything back that was changed in this pass."""
        changes = self._changes[::-1]
        self.commit()
        for restore, state in changes:
            restore(*state)

    def commit(self) -> None:
        """Forget how to undo the pass: it has ended."""
        self.open = False
        self._changes.clear()
