"""KIVI: plain rounding, keys per channel in groups of tokens, values per token in groups of channels. No calibration.

A few channels of the keys are large in every token; with a range for each channel they harm only themselves. Values
have no such channels. "2 bits" are 2 and two 16-bit numbers per group: 3 in groups of 32, 2.25 in groups of 128.
`-r32` has a residual of 32, as SQuat (appendix D.2) compares with it, and SubKV's blocks.

Source: Liu et al., 2024 (KIVI), algorithm 1; groups of 32 and a residual of 128 as in its section 4.1.
Differs: keys leave the window 128 at a time, as there, but the 128 newest stay exact (theirs: between 0 and 127, as
their buffer empties at a flush); values leave it together with the keys, not one by one. Groups of `g128` values are a
head's channels. A key group never has fewer than `group` tokens, so that generated tokens are really rounded.
"""

from dataclasses import replace

from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.rtn import Rtn


def keys(bits: int, group: str | int = 32, block: int = 128) -> Side:
    """Keys per channel, in groups of tokens inside a block."""
    return Side(quantize=Rtn(bits, group), axis="channel", sinks=0, recent=128, block=block)


def values(bits: int, group: str | int = 32, block: int = 128) -> Side:
    """Values per token, in groups of channels."""
    return Side(quantize=Rtn(bits, group), sinks=0, recent=128, block=block)


def recipes() -> list[Recipe]:
    """2, 3 and 4 bits, in groups of 32 and of 128; 2 bits with the short residual."""
    found = []
    for bits in (2, 3, 4):
        small, large = (keys(bits), values(bits)), (keys(bits, 128), values(bits, "head"))
        found.append(Recipe(f"kivi-{bits}bit", *small, summary=f"KIVI, {bits} bits, groups of 32"))
        found.append(Recipe(f"kivi-{bits}bit-g128", *large, summary=f"KIVI, {bits} bits, keys in groups of 128 tokens"))
    short = (replace(keys(2), recent=32, block=32), replace(values(2), recent=32, block=32))
    return [*found, Recipe("kivi-2bit-r32", *short, summary="KIVI, 2 bits, groups of 32, a residual of 32")]
