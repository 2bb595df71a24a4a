"""Find from how many tokens on a fitted recipe saves memory, its fitted tensors included."""

from collections.abc import Callable, Iterable

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe


def smaller_from(
    recipe: Recipe,
    geometry: Geometry,
    shared_bytes: int,
    plain: Iterable[Recipe],
    asymptotic_bits: Callable[[Recipe, Geometry], float],
) -> int | None:
    """Tokens (batch 1) from which a recipe holds fewer bytes than plain recipes, which have no fitted tensors.

    It is compared with the plain recipe of the fewest bits at or above its own.

    plain             those recipes: HIGGS at all widths
    shared_bytes      of the recipe's fitted tensors and rotations
    asymptotic_bits   (recipe, geometry) → bits per element seen, without fitted tensors
    None if never, and for the plain recipes themselves.
    """
    plain = list(plain)
    if recipe.name in {other.name for other in plain}:
        return None
    bits = asymptotic_bits(recipe, geometry)
    peers = [asymptotic_bits(other, geometry) for other in plain if _serves(other, geometry)]
    wider = [peer for peer in peers if peer >= bits]
    if not wider:
        return None
    saved = (min(wider) - bits) * 2 * geometry.layers * geometry.width / 8  # bytes a token
    return None if saved <= 0 else -int(-shared_bytes // saved)


def _serves(recipe: Recipe, geometry: Geometry) -> bool:
    """Whether a recipe can be used with these head sizes."""
    try:
        recipe.check(geometry)
    except ValueError:
        return False
    return True
