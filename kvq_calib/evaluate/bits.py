"""State what a recipe's cache costs: every byte that it holds, computed from shapes."""

from typing import Any

from kvq_runtime.geometry import NONE_SLIDE, Geometry, Sliding
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.held import Sizes, smaller_from
from kvq_runtime.store.memory import asymptotic_bits

TOKENS = 4096


def costs(recipe: Recipe, geometry: Geometry, length: int, sliding: Sliding = NONE_SLIDE) -> dict[str, Any]:
    """Bits per element: asymptotic, and of caches that hold `length` and 4096 tokens; bytes of the latter.

    A dynamic window is billed at its longest.
    """
    sizes = Sizes(recipe, geometry, sliding=sliding)
    here, there = sizes.at(length), sizes.at(TOKENS)
    shared = sum(there.shared.values())
    return {
        "asymptotic": asymptotic_bits(recipe, geometry),
        "at_length": here.own_bits,
        f"at_{TOKENS}": there.own_bits,
        f"all_at_{TOKENS}": there.bits,
        f"bytes_at_{TOKENS}": there.total,
        f"exact_bytes_at_{TOKENS}": there.exact,
        "shared_bytes": shared,
        "smaller_from": smaller_from(recipe, geometry, shared),
    }
