"""H2O: hold the heavy hitters, the tokens that get the most attention; drop the others before they are encoded.

    score_t = Σ over layers, query heads and queries of the attention that token t got / queries that could see it

The newest tokens are always held, and so is every sink. Of those that have left the recent window, `block` at a time,
and of those kept before but not encoded yet, the ones with the largest score are kept, as many as the recipe's share of
all tokens seen allows.

The newest tokens are those of the recipe's window, a fixed number, or, with `recent`, a share of the tokens seen if
that is more; these stay exact until they are old enough to be chosen from, since what is encoded cannot be dropped.

Held tokens are stored by AQUA-KV, HIGGS or in 16 bit. Fits do not depend on it: `aqua-h2o-2bit` has the tensors of
`aqua-2bit`. Any recipe holds fewer tokens by a setting, `higgs-4bit+policies.heavy=on+policies.heavy.share=0.5`.

    h2o-halves   the paper's split of that share: half of it the newest tokens, which stay exact until they are chosen

Source: Zhang et al., 2023 (H2O, arXiv 2306.14048), algorithm 1, whose budget is half of heavy and half of recent tokens
(`recent` half of `share`); shares of 20% and 50% as in Shutova et al., 2025 (AQUA-KV), tables 7 and 20.
Differs: without `recent`, all of the share beyond the window is of heavy tokens; one set for all heads and layers,
theirs is by head; mass by query, theirs is the sum, which favours tokens that came early; an encoded token stays,
theirs may be dropped at any step; positions are the tokens' own.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvq_runtime.geometry import Window
from kvq_runtime.policies.evict import Evicting
from kvq_runtime.recipe import Family, Recipe
from kvq_runtime.recipes import aqua, exact, higgs


@dataclass(frozen=True)
class HeavyHitters(Evicting):
    """Hold the tokens that attention looks at most, H2O's heavy hitters.

    share    of the tokens seen that are held, sinks and the newest among them; over 0, at most 1
    recent   of the tokens seen that are the newest and held as such, if more than the window's; less than `share`
    """

    kind: ClassVar[str] = "heavy"
    share: float = 0.2
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


def h2o(name: str, recipe: Recipe, recent: float = 0.0) -> Recipe:
    """Return the recipe over a fifth of all tokens, of which this share are the newest."""
    how = ", half of them the newest" if recent else ""
    summary = f"{recipe.summary}, over the 20% of tokens that H2O holds{how}"
    return replace(recipe, name=name, policies=(HeavyHitters(0.2, recent),), summary=summary)


PLAIN, HIGGS = exact.exact("exact", "post"), higgs.higgs("higgs-2bit", "2bit")
AQUA = aqua.aqua("aqua-2bit", higgs.scheme("2bit"), higgs.scheme("4bit"), "AQUA-KV, 2 bits")
FAMILY = Family(
    presets={
        "h2o": partial(h2o, recipe=PLAIN),
        "h2o-halves": partial(h2o, recipe=PLAIN, recent=0.1),
        "h2o-higgs-2bit": partial(h2o, recipe=HIGGS),
        "aqua-h2o-2bit": partial(h2o, recipe=AQUA),
    },
    compared=("aqua-h2o-2bit", "h2o"),
)
