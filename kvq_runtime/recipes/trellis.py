"""Trellis codes: rotate every head by a signed Hadamard, then take the best path through a bitshift trellis.

Each element has k bits, and is decoded from the last 10 of its token: one of 1024 values, by a shift and a lookup, as
cheap as a scalar code. The encoder finds the best of all paths through a token when its block is full. At HIGGS's bits
the error is smaller, and encoding takes many times longer.

Source: Tseng et al., 2024 (QTIP), section 3, a method for weights; here for caches, over HIGGS's rotation and scale.
Differs: see `ops/trellis.py`.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import aqua, higgs
from kvq_runtime.stages.codebook import Trellis
from kvq_runtime.stages.rotate import Hadamard

FAMILY = Family(
    papers={"QTIP": "Tseng et al., 2024, arXiv 2406.11235 (for weights)"},
    golden=("trellis-head-1bit",),
    compared=("aqua-trellis-2bit", "trellis-head-1bit", "trellis-head-2bit", "trellis-head-3bit"),
)

BITS = (1, 2, 3, 4)


def scheme(bits: int, group: str = "head") -> Scheme:
    """A scheme of trellis codes at these bits, with one scale per head or per 1024 elements."""
    return Scheme(quantize=Trellis(bits, group=group), rotate=Hadamard(group))


def recipes() -> list[Recipe]:
    """Per head, 1 to 4 bits; and AQUA-KV's prediction over them at 2."""
    found = []
    for bits in BITS:
        head, summary = scheme(bits), f"trellis codes, {bits} bits, a scale per head"
        found.append(Recipe(f"trellis-head-{bits}bit", head, head, summary=summary))
    over = aqua.aqua(
        "trellis-2bit", scheme(2, "all"), higgs.scheme("4bit"), summary="AQUA-KV over trellis codes, 2 bits"
    )
    return [*found, over]
