"""QuaRot's cache: a signed Hadamard, then plain rounding per token.

Source: Ashkboos et al., 2024 (QuaRot, arXiv 2404.00456), section 4; group size 1024 as in Shutova et al., 2025
(AQUA-KV), table 1.
Differs: a range is that of the group's own ends, without a clipping ratio.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn

FAMILY = Family(
    papers={"QuaRot": "Ashkboos et al., 2024, arXiv 2404.00456"},
    golden=("quarot-2bit",),
    compared=("quarot-2bit", "quarot-3bit"),
)


def scheme(bits: int, group: str = "all", predict=None) -> Scheme:
    """A scheme of QuaRot at these bits."""
    return Scheme(quantize=Rtn(bits, group), rotate=Hadamard(group), predict=predict)


def recipes() -> list[Recipe]:
    """2, 3 and 4 bits, all heads together or per head."""
    found = []
    for bits in (2, 3, 4):
        found.append(Recipe(f"quarot-{bits}bit", scheme(bits), scheme(bits), summary=f"QuaRot, {bits} bits"))
        head = scheme(bits, "head")
        found.append(Recipe(f"quarot-head-{bits}bit", head, head, summary=f"QuaRot, {bits} bits, per head"))
    return found
