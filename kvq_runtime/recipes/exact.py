"""The uncompressed cache, stored through the same blocks, sinks and window as every recipe."""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.exact import Exact

FAMILY = Family(
    compared=(),
)


def recipes() -> list[Recipe]:
    """`exact` keeps keys after RoPE, bit for bit; `exact-pre` undoes RoPE and puts it back (within 2 ulp)."""
    scheme = Scheme(quantize=Exact())
    return [
        Recipe("exact", scheme, scheme, summary="16 bit, as the model gave it"),
        Recipe("exact-pre", scheme, scheme, position="pre", summary="16 bit, keys before RoPE"),
    ]
