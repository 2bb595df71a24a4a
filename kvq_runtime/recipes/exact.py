"""The uncompressed cache, stored through the same blocks, sinks and window as every recipe.

exact       keys after RoPE, bit for bit
exact-pre   RoPE is undone and put back, within 2 ulp
"""

from functools import partial

from kvq_runtime.recipe import Family, Position, Recipe, Scheme
from kvq_runtime.stages.exact import Exact

SCHEME = Scheme(quantize=Exact())


def exact(name: str, position: Position) -> Recipe:
    """Keys and values in the model's dtype."""
    where = "as the model gave it" if position == "post" else "keys before RoPE"
    return Recipe(name, SCHEME, SCHEME, position, summary=f"16 bit, {where}")


FAMILY = Family(presets={"exact": partial(exact, position="post"), "exact-pre": partial(exact, position="pre")})
