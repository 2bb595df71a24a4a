"""Find from how many tokens on a recipe saves memory, its fitted tensors included: beside 16 bit, beside HIGGS."""

from collections.abc import Iterable

import torch

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.store.held import Sizes
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.memory import asymptotic_bits

PLAIN = tuple(f"higgs-{bits}" for bits in ("1bit", "1.5bit", "2bit", "2bit-slow", "3bit", "4bit"))


class BreakEven:
    """Tokens a row from which on a cache always holds fewer bytes than one of 16 bit.

    held    the layers that the cache holds
    dtype   of the model's keys and values, while the cache is empty
    """

    def __init__(self, recipe: Recipe, geometry: Geometry, held: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
        self.recipe, self.geometry, self.held, self.dtype = recipe, geometry, held, dtype
        self._known: dict[tuple[int, torch.dtype], int | None] = {}  # by rows and dtype

    def of(self, stores: Iterable[LayerStore]) -> int | None:
        """For as many rows, and of the dtype, that the layers have; of an empty cache 1 and its own. None: never."""
        store = next(iter(stores), None)
        case = (1, self.dtype) if store is None else (max(1, store.rows), store.buffer_2BTC.dtype)
        if case not in self._known:
            rows, dtype = case
            self._known[case] = Sizes(self.recipe, self.geometry, dtype, self.held).smaller_from(rows)
        return self._known[case]


def smaller_from(recipe: Recipe, geometry: Geometry, shared_bytes: int) -> int | None:
    """Tokens (batch 1) from which a recipe holds fewer bytes than plain recipes, which have no fitted tensors.

    It is compared with the plain recipe of the fewest bits at or above its own.

    shared_bytes   of the recipe's fitted tensors and rotations
    None if never, and for the plain recipes themselves.
    """
    if recipe.name in PLAIN:
        return None
    bits = asymptotic_bits(recipe, geometry)
    peers = [asymptotic_bits(other, geometry) for other in map(preset, PLAIN) if _serves(other, geometry)]
    wider = [peer for peer in peers if peer >= bits]
    if not wider:
        return None
    saved = (min(wider) - bits) * 2 * geometry.layers * geometry.width / 8  # bytes a token
    return None if saved <= 0 else -int(-shared_bytes // saved)


def _serves(recipe: Recipe, geometry: Geometry) -> bool:
    """True if the recipe can be used with these head sizes."""
    try:
        recipe.check(geometry)
    except ValueError:
        return False
    return True
