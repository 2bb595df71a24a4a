"""Plain rounding, as in Quanto: per token, the ends of each group of channels stored in 16 bits.

    rtn-*          groups of a head
    quanto-*       groups of 64 channels, AQUA-KV's baseline; -1024: of a whole token, 1024 in its Llama models

Source: optimum-quanto, as used by Shutova et al., 2025 (AQUA-KV), section 4.1 and tables 1 and 9.
"""

from typing import Literal

from kvq_runtime.family import Family
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.rtn import Rtn

FAMILY = Family(
    look=("grey", "v"),
    golden=("rtn-2bit",),
    compared=("rtn-2bit", "rtn-3bit", "rtn-4bit"),
)


def scheme(bits: int, group: str | int = 64, range: Literal["minmax", "absmax"] = "minmax", predict=None) -> Scheme:
    """A scheme of plain rounding per token."""
    return Scheme(quantize=Rtn(bits, group, range), predict=predict)


def recipes() -> list[Recipe]:
    """2, 3 and 4 bits in groups of a head, and the symmetric kind; Quanto's groups."""
    found = []
    for bits in (2, 3, 4, 8):
        plain, symmetric = scheme(bits, "head"), scheme(bits, "head", "absmax")
        found.append(Recipe(f"rtn-{bits}bit", plain, plain, summary=f"rounding, {bits} bits, groups of a head"))
        found.append(Recipe(f"rtn-absmax-{bits}bit", symmetric, symmetric, summary=f"the same, {bits} bits, symmetric"))
    for bits in (2, 3, 4):
        for suffix, group, groups in (("", 64, "groups of 64"), ("-1024", "all", "one group per token")):
            plain = scheme(bits, group)
            found.append(Recipe(f"quanto-{bits}bit{suffix}", plain, plain, summary=f"Quanto, {bits} bits, {groups}"))
    return found
