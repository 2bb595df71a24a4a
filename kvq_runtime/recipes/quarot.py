"""QuaRot's cache: a signed Hadamard, then plain rounding per token.

Source: Ashkboos et al., 2024 (QuaRot, arXiv 2404.00456), section 4; group size 1024 as in Shutova et al., 2025
(AQUA-KV), table 1.
Differs: a range is that of the group's own ends, without a clipping ratio.
"""

from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn


def scheme(bits: int, group: str = "all", predict=None) -> Scheme:
    """Return a scheme of QuaRot at these bits."""
    return Scheme(quantize=Rtn(bits, group), rotate=Hadamard(group), predict=predict)


def quarot(name: str, bits: int, group: str = "all") -> Recipe:
    """All heads rotated and rounded together, or each by itself."""
    rounded, how = scheme(bits, group), "" if group == "all" else ", per head"
    return Recipe(name, rounded, rounded, summary=f"QuaRot, {bits} bits{how}")


FAMILY = Family(
    presets={"quarot-2bit": partial(quarot, bits=2)}
    | {f"quarot-head-{bits}bit": partial(quarot, bits=bits, group="head") for bits in (2, 4)},
    compared=("quarot-2bit",),
)
