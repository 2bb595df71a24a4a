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
from typing import Any

from kvq_runtime.recipe import Family, Recipe, Scheme, Window
from kvq_runtime.stages.rtn import Rtn

WINDOW = Window(sinks=0)  # the residual of 128 tokens


def keys(bits: int, group: str | int = 32) -> Scheme:
    """Keys per channel, in groups of tokens inside a block."""
    return Scheme(quantize=Rtn(bits, group), axis="channel")


def values(bits: int, group: str | int = 32) -> Scheme:
    """Values per token, in groups of channels."""
    return Scheme(quantize=Rtn(bits, group))


def kivi(
    name: str, bits: int, groups: tuple[int, int | str] = (32, 32), how: str = "groups of 32", window: Window = WINDOW
) -> Recipe:
    """Return KIVI with these groups, of tokens for keys and of channels for values."""
    summary = f"KIVI, {bits} bits, {how}"
    return Recipe(name, keys(bits, groups[0]), values(bits, groups[1]), summary=summary, window=window)


WIDE: dict[str, Any] = {"groups": (128, "head"), "how": "keys in groups of 128 tokens"}
SHORT: dict[str, Any] = {"how": "groups of 32, a residual of 32", "window": Window(sinks=0, recent=32, block=32)}
FAMILY = Family(
    presets={f"kivi-{bits}bit": partial(kivi, bits=bits) for bits in (2, 4)}
    | {f"kivi-{bits}bit-g128": partial(kivi, bits=bits, **WIDE) for bits in (2, 4)}
    | {"kivi-2bit-r32": partial(kivi, bits=2, **SHORT)},
    compared=("kivi-2bit", "kivi-4bit"),
)
