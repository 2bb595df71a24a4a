"""Choose which tokens are held: a setting of the whole recipe, because a token is held by all layers or by none."""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Heavy:
    """Hold the tokens that attention looks at most, H2O's heavy hitters: see `kvq_runtime/hitters.py`.

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


KINDS = (Heavy,)
