"""OSCAR: rotate each head by the eigenvectors of what reads it and a Hadamard, clip, and round per token.

Keys are in the metric of the queries after RoPE, values in that of the attention-weighted values.

The largest 4% of a key's magnitudes, and 8% of a value's, are cut, as the authors serve it. A code has 2 and two 16-bit
numbers for a head: 2.25 bits for heads of 128.

Source: Zhou et al., 2026 (OSCAR, arXiv 2605.17757); thresholds 0.96 and 0.92 of the authors' code.
Differs: window and sinks are ours, as for every recipe (theirs: 64 sinks, 256 recent tokens). One rotation for each
cached head: see `stages/rotate.py`.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.rotate import Oscar
from kvq_runtime.stages.rtn import Clipped


def oscar(name: str) -> Recipe:
    """2 bits, values weighed by the attention that they get."""
    key = Scheme(Clipped(2, "head", keep=0.96), rotate=Oscar("queries"))
    value = Scheme(Clipped(2, "head", keep=0.92), rotate=Oscar("attended"))
    return Recipe(name, key, value, summary="OSCAR, 2 bits")


FAMILY = Family(
    presets={"oscar-2bit": oscar},
    compared=("oscar-2bit",),
)
