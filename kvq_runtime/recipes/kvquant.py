"""KVQuant: keys before RoPE with a calibrated range per channel, values with a range per token, points fitted by
k-means instead of even steps, and the 1% of elements that are farthest out kept exact. The first token stays exact.

Before RoPE the channels of keys keep their sizes from token to token, so that their ranges can be fitted offline;
values have no such channels. "3 bits" are 3.3 with the outliers, and 32 more bits per token of values.

Outliers go with any rounding: `kivi-2bit+key.correct=sparse+key.correct.group=channel+value.correct=sparse`.

Source: Hooper et al., 2024 (KVQuant, arXiv 2401.18079), sections 3.1 to 3.5, table 1.
Differs: the number of outliers is fixed; those of keys are chosen by their rounding errors, so that the largest
errors of a block are stored, not those beyond the threshold of their channel; the 128 newest tokens stay exact and are
encoded 128 at a time (theirs: at once); k-means is not weighted by Fisher information.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme, Window
from kvq_runtime.stages.correct import Sparse
from kvq_runtime.stages.nuq import Nuq


def keys(bits: int) -> Scheme:
    """Ranges by channel, and the 1% of a block with the largest errors, exact."""
    return Scheme(Nuq(bits, "channel"), correct=Sparse(group="block"))


def values(bits: int) -> Scheme:
    """Ranges by token, and the 1% of a token that are farthest from its median, exact."""
    return Scheme(Nuq(bits, "token"), correct=Sparse(group="token"))


def kvquant(name: str) -> Recipe:
    """3 bits and 1% outliers, as in the paper's table 1."""
    return Recipe(name, keys(3), values(3), "pre", summary="KVQuant, 3 bits, 1% outliers", window=Window(sinks=1))


FAMILY = Family(
    presets={"kvquant-3bit": kvquant},
    compared=("kvquant-3bit",),
)
