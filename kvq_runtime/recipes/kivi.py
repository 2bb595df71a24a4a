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

from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme, Window
from kvq_runtime.stages.rtn import Rtn

WINDOW = Window(sinks=0)  # the residual of 128 tokens


def keys(bits: int, group: str | int = 32) -> Scheme:
    """Keys per channel, in groups of tokens inside a block."""
    return Scheme(quantize=Rtn(bits, group), axis="channel")


def values(bits: int, group: str | int = 32) -> Scheme:
    """Values per token, in groups of channels."""
    return Scheme(quantize=Rtn(bits, group))


def kivi(name: str, bits: int) -> Recipe:
    """Groups of 32."""
    return Recipe(name, keys(bits), values(bits), summary=f"KIVI, {bits} bits, groups of 32", window=WINDOW)


def short(name: str) -> Recipe:
    """2 bits, a residual of 32."""
    summary = "KIVI, 2 bits, groups of 32, a residual of 32"
    return Recipe(name, keys(2), values(2), summary=summary, window=Window(sinks=0, recent=32, block=32))


def wide(name: str, bits: int) -> Recipe:
    """Groups of 128 tokens, and of a head's channels: the fastest for the decode kernel."""
    summary = f"KIVI, {bits} bits, keys in groups of 128 tokens"
    return Recipe(name, keys(bits, 128), values(bits, "head"), summary=summary, window=WINDOW)


FAMILY = Family(
    presets={f"kivi-{bits}bit": partial(kivi, bits=bits) for bits in (2, 4)}
    | {f"kivi-{bits}bit-g128": partial(wide, bits=bits) for bits in (2, 4)}
    | {"kivi-2bit-r32": short},
    compared=("kivi-2bit", "kivi-4bit"),
)
