"""KIVI: plain rounding, keys per channel in groups of tokens, values per token in groups of channels. No calibration.

A few channels of the keys are large in every token; with a range per channel they do not widen the ranges of others.
Values have no such channels. "2 bits" are 2 and two 16-bit numbers per group: 3 in groups of 32, 2.25 in groups of 128.
`-r32` has a residual of 32, as SQuat (appendix D.2) compares with it, and SubKV's blocks.

Source: Liu et al., 2024 (KIVI, arXiv 2402.02750), algorithm 1; groups of 32 and a residual of 128 as in its section
4.1.
Differs: keys leave the window 128 at a time, as there, but the 128 newest stay exact (theirs: between 0 and 127, as
their buffer empties at a flush); values leave it together with the keys, not one by one. Groups of `g128` values are a
head's channels. A key group never has fewer than `group` tokens, so that generated tokens are really rounded.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme, Window
from kvq_runtime.stages.rtn import Rtn

FAMILY = Family(
    papers={"KIVI": "Liu et al., 2024, arXiv 2402.02750"},
    golden=("kivi-2bit",),
    compared=("kivi-2bit", "kivi-2bit-r32", "kivi-3bit", "kivi-4bit"),
)

WINDOW = Window(sinks=0)  # the residual of 128 tokens
SHORT = Window(sinks=0, recent=32, block=32)


def keys(bits: int, group: str | int = 32) -> Scheme:
    """Keys per channel, in groups of tokens inside a block."""
    return Scheme(quantize=Rtn(bits, group), axis="channel")


def values(bits: int, group: str | int = 32) -> Scheme:
    """Values per token, in groups of channels."""
    return Scheme(quantize=Rtn(bits, group))


def recipes() -> list[Recipe]:
    """2, 3 and 4 bits, in groups of 32 and of 128; 2 bits with the short residual."""
    found = []
    for bits in (2, 3, 4):
        small, large = (keys(bits), values(bits)), (keys(bits, 128), values(bits, "head"))
        for name, schemes, groups in (("", small, "groups of 32"), ("-g128", large, "keys in groups of 128 tokens")):
            summary = f"KIVI, {bits} bits, {groups}"
            found.append(Recipe(f"kivi-{bits}bit{name}", *schemes, summary=summary, window=WINDOW))
    summary = "KIVI, 2 bits, groups of 32, a residual of 32"
    return [*found, Recipe("kivi-2bit-r32", keys(2), values(2), summary=summary, window=SHORT)]
