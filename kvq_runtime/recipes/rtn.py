"""Plain rounding, as in Quanto: per token, the ends of each group of channels stored in 16 bits.

    rtn-*          groups of a head
    quanto-*       groups of 64 channels, AQUA-KV's baseline; `+all.quantize.group=all`: of a whole token, 1024 in its
                   Llama models

Source: optimum-quanto, as used by Shutova et al., 2025 (AQUA-KV), section 4.1 and tables 1 and 9.
"""

from typing import Literal

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.rtn import Rtn

FAMILY = Family(
    golden=("rtn-2bit",),
    compared=("rtn-2bit", "rtn-3bit", "rtn-4bit"),
)


def scheme(bits: int, group: str | int = 64, range: Literal["minmax", "absmax"] = "minmax", predict=None) -> Scheme:
    """A scheme of plain rounding per token."""
    return Scheme(quantize=Rtn(bits, group, range), predict=predict)


def recipes() -> list[Recipe]:
    """2, 3, 4 and 8 bits in groups of a head, and the symmetric kind at 4; Quanto's groups."""
    found = []
    for bits in (2, 3, 4, 8):
        plain = scheme(bits, "head")
        found.append(Recipe(f"rtn-{bits}bit", plain, plain, summary=f"rounding, {bits} bits, groups of a head"))
    for bits in (2, 3, 4):
        groups = scheme(bits)
        found.append(Recipe(f"quanto-{bits}bit", groups, groups, summary=f"Quanto, {bits} bits, groups of 64"))
    symmetric = scheme(4, "head", "absmax")
    return [*found, Recipe("rtn-absmax-4bit", symmetric, symmetric, summary="the same, 4 bits, symmetric")]
