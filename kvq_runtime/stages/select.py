"""Choose which tokens are held, or which of those held are read: a setting of the whole recipe."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Heavy:
    """Hold the tokens that attention looks at most, H2O's heavy hitters, in all layers: see `kvq_runtime/hitters.py`.

    share   of the tokens seen that are held, sinks and the recent window among them; over 0, at most 1
    """

    kind: ClassVar[str] = "heavy"
    share: float = 0.2

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}; use a number over 0 and at most 1")

    def held(self, left: int, sinks: int, recent: int) -> int:
        """How many are held of the first `left` tokens, with `recent` newer ones behind them: sinks at least."""
        budget = math.ceil(self.share * (left + recent) - 1e-9) - recent
        return min(left, max(budget, sinks))


@dataclass(frozen=True)
class Chunks:
    """Hold all tokens, and read the chunks that queries ask for, ShadowKV's: see `kvq_runtime/attention/shadow.py`.

    chunk      tokens that are chosen together
    budget     tokens of chosen chunks, by row and KV head; sinks, outliers and the window are read beside them
    outliers   chunks, by row and KV head, whose keys are kept exact and always read
    """

    kind: ClassVar[str] = "chunks"
    chunk: int = 8
    budget: int = 2048
    outliers: int = 48

    def __post_init__(self):
        if self.chunk < 1 or self.outliers < 0 or self.budget < self.chunk:
            raise ValueError(f"{self}; use a chunk of at least 1, a budget of at least a chunk, and outliers from 0")

    @property
    def count(self) -> int:
        """Chunks that the budget holds."""
        return self.budget // self.chunk

    def bits(self, dtype: torch.dtype) -> float:
        """What a landmark costs, in bits per element of the keys."""
        return 8 * dtype.itemsize / self.chunk


KINDS = (Heavy, Chunks)
