"""GEAR: KIVI's rounding, the leading directions of its error by head, and the 2% of elements farthest out kept exact.

    gear-4bit       a range for each channel of keys in a block, and for each token of values
    gear-2bit       groups of 64

Without the outliers it is the paper's GEAR-L, `gear-2bit+all.correct=low_rank`; with one direction,
`+all.correct.rank=1`, it takes about the bits of KIVI in groups of 32.
SQuat (appendix D.2) compares with rank 2 over groups of 32: `gear-2bit+all.quantize.group=32+all.correct.rank=2`.
A direction costs 16 (1/D + 1/128) bits per element: four are 1 bit of a head of 128 channels, 1.5 of one of 64.
Outliers cost 0.5 bits.

Source: Kang et al., 2024 (GEAR, arXiv 2403.05527), section 4: rank 4, 2% outliers; for 2 bits over KIVI in groups of
64, for 4 over its variant without groups (KCVT). These settings are quoted from memory: the paper's text was not at
hand, and the authors' published code, which the method was compared with, takes them from its command line.
Differs: prompt and generated text are both blocks of 128 tokens, each with its own four directions, and the 128
newest tokens are exact (theirs: factors of the whole prompt, others of each buffer of generated tokens), so that
directions cost more bits, and a block once stored stays. Outliers are those of a block's channel or of a token that
are farthest from its median, which replaces them while the rest is rounded (theirs: half of them at either end of
the whole prompt's channel or of the token, and its mean).
"""

from dataclasses import replace
from functools import partial

from kvq_runtime.recipe import Family, Recipe
from kvq_runtime.recipes import kivi
from kvq_runtime.stages.correct import LowRankSparse


def gear(name: str, bits: int, group: str | int) -> Recipe:
    """Rank 4 and 2% outliers."""
    key = replace(kivi.keys(bits, group), correct=LowRankSparse(group="channel"))
    value = replace(kivi.values(bits, group), correct=LowRankSparse(group="token"))
    groups = f", groups of {group}" if group != "all" else ""
    return Recipe(name, key, value, summary=f"GEAR, {bits} bits{groups}, rank 4, 2% outliers", window=kivi.WINDOW)


FAMILY = Family(
    presets={"gear-2bit": partial(gear, bits=2, group=64), "gear-4bit": partial(gear, bits=4, group="all")},
    compared=("gear-2bit",),
)
