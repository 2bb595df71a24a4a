"""Hold the heavy hitters (H2O): the tokens that get the most attention; drop the others before they are encoded.

    score_t = Σ over layers, query heads and queries of the attention that token t got / queries that could see it

The newest tokens are always held, and so is every sink. Of those that have left the recent window, `block` at a time,
and of those kept before but not encoded yet, the ones with the largest score are kept, as many as the recipe's share of
all tokens seen allows.

The newest tokens are those of the recipe's window, a fixed number, or, with `recent`, a share of the tokens seen if
that is more; these stay exact until they are old enough to be chosen from, since what is encoded cannot be dropped.

Source: Zhang et al., 2023 (H2O), algorithm 1, whose budget is half of heavy and half of recent tokens (`recent` half of
`share`); a share of 20% as in Shutova et al., 2025 (AQUA-KV), table 7.
Differs: without `recent`, all of the share beyond the window is of heavy tokens; one set for all heads and layers,
theirs is by head; mass by query, theirs is the sum, which favours tokens that came early; an encoded token stays,
theirs may be dropped at any step; positions are the tokens' own.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvq_runtime.geometry import Window
from kvq_runtime.policies.evict import Evicting


@dataclass(frozen=True)
class HeavyHitters(Evicting):
    """Hold the tokens that attention looks at most, H2O's heavy hitters.

    share    of the tokens seen that are held, sinks and the newest among them; over 0, at most 1
    recent   of the tokens seen that are the newest and held as such, if more than the window's; less than `share`
    """

    kind: ClassVar[str] = "heavy"
    papers: ClassVar[tuple[str, ...]] = ("2306.14048",)
    neutral: ClassVar[Mapping[str, Any]] = {"share": 1.0, "recent": 0.0}
    share: float = 0.2
    _: KW_ONLY  # younger than the file format
    recent: float = 0.0

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}; use a number over 0 and at most 1")
        if not 0 <= self.recent < self.share:
            raise ValueError(f"recent={self.recent}; use at least 0 and less than share={self.share}")

    def budget(self, tokens: int, window: Window) -> tuple[int, int]:
        """Count the tokens older than the newest, in whole blocks, and those that the share leaves: sinks at least."""
        newest = max(window.recent, math.ceil(self.recent * tokens - 1e-9))
        old = max(0, tokens - newest) // window.block * window.block
        return old, min(old, max(math.ceil(self.share * (old + newest) - 1e-9) - newest, window.sinks))

    def score(self, mass_BT: Tensor, queries_BT: Tensor) -> Tensor:
        return mass_BT / queries_BT.clamp(min=1)

    def held_share(self) -> float:
        return self.share
