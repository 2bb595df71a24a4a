"""GEAR: KIVI's rounding, the leading directions of its error by head, and the 2% of elements farthest out kept exact.

    gear-4bit       a range for each channel of keys in a block, and for each token of values
    gear-2bit       groups of 64
    gear-l-2bit     without the outliers, the paper's GEAR-L
    gear-l-2bit-r1  one direction, not four: about the bits of KIVI in groups of 32

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

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import kivi
from kvq_runtime.stages.correct import LowRank, LowRankSparse

FAMILY = Family(
    papers={"GEAR": "Kang et al., 2024, arXiv 2403.05527"},
    golden=("gear-2bit", "gear-l-2bit"),
    compared=("gear-2bit", "gear-l-2bit-r1"),
)

Correct = LowRank | LowRankSparse


def schemes(bits: int, group: str | int, key: Correct, value: Correct) -> tuple[Scheme, Scheme]:
    """KIVI's keys and values, each with a correction of its rounding error."""
    return replace(kivi.keys(bits, group), correct=key), replace(kivi.values(bits, group), correct=value)


def recipes() -> list[Recipe]:
    """2 and 4 bits; 2 bits with the low rank alone."""
    both, four, one = (LowRankSparse(group="channel"), LowRankSparse(group="token")), LowRank(4), LowRank(1)
    pairs = {
        "gear-2bit": (schemes(2, 64, *both), "GEAR, 2 bits, groups of 64, rank 4, 2% outliers"),
        "gear-4bit": (schemes(4, "all", *both), "GEAR, 4 bits, rank 4, 2% outliers"),
        "gear-l-2bit": (schemes(2, 64, four, four), "GEAR, 2 bits, groups of 64, rank 4, no outliers"),
        "gear-l-2bit-r1": (schemes(2, 64, one, one), "GEAR, 2 bits, groups of 64, rank 1, no outliers"),
    }
    return [Recipe(name, *pair, summary=text, window=kivi.WINDOW) for name, (pair, text) in pairs.items()]
