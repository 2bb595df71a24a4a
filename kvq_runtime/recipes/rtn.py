"""Plain rounding, as in Quanto: per token, the ends of each group of channels stored in 16 bits.

    rtn-*          groups of a head
    quanto-*       groups of 64 channels, AQUA-KV's baseline; `+all.quantize.group=all`: of a whole token, 1024 in its
                   Llama models

Source: optimum-quanto, as used by Shutova et al., 2025 (AQUA-KV), section 4.1 and tables 1 and 9.
"""

from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.rtn import Rtn


def scheme(bits: int, group: str | int = 64) -> Scheme:
    """Return a scheme of plain rounding per token."""
    return Scheme(quantize=Rtn(bits, group))


def rtn(name: str, bits: int, group: str | int, title: str) -> Recipe:
    """Return plain rounding in these groups."""
    rounded = scheme(bits, group)
    groups = "groups of a head" if group == "head" else f"groups of {group}"
    return Recipe(name, rounded, rounded, summary=f"{title}, {bits} bits, {groups}")


FAMILY = Family(
    presets={f"rtn-{bits}bit": partial(rtn, bits=bits, group="head", title="rounding") for bits in (2, 4, 8)}
    | {f"quanto-{bits}bit": partial(rtn, bits=bits, group=64, title="Quanto") for bits in (2, 4)},
    compared=("rtn-2bit", "rtn-4bit"),
)
