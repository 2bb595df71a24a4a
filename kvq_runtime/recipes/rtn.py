"""Plain rounding, as in Quanto: per token, groups of 64 channels, the group's ends stored in 16 bits.

Source: optimum-quanto, as used by Shutova et al., 2025 (AQUA-KV), section 4.1 and table 9.
"""

from typing import Literal

from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.rtn import Rtn


def scheme(bits: int, group: str | int = 64, range: Literal["minmax", "absmax"] = "minmax", predict=None) -> Scheme:
    """A scheme of plain rounding per token."""
    return Scheme(quantize=Rtn(bits, group, range), predict=predict)


def recipes() -> list[Recipe]:
    """2, 3 and 4 bits in groups of a head, and the symmetric kind."""
    found = []
    for bits in (2, 3, 4, 8):
        plain, symmetric = scheme(bits, "head"), scheme(bits, "head", "absmax")
        found.append(Recipe(f"rtn-{bits}bit", plain, plain, summary=f"rounding, {bits} bits, groups of a head"))
        found.append(Recipe(f"rtn-absmax-{bits}bit", symmetric, symmetric, summary=f"the same, {bits} bits, symmetric"))
    return found
