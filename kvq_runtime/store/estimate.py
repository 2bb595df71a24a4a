"""Estimate the bytes of a cache from its recipe and the model's shape, within 2% of what `memory_report()` counts.

exact     sinks, recent and block tokens, in the model's dtype
blocks    ⌊(T - recent) / block⌋, in slabs of 32, of which the last grows by doubling
policies  what a policy stores beside them, by its `held_bytes` and `extra_bits`
shared    fitted tensors and rotations: once, whatever the tokens and rows
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import NONE_SLIDE, SLAB, Geometry, Sliding
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.stage import Specs
from kvq_runtime.store.memory import scheme_bits
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes of `batch` rows of `tokens` tokens: `sequence` grow with both, `shared` do not, `exact` are those of a
    16-bit cache, `sliding` are in either cache."""

    tokens: int
    batch: int
    sequence: int
    shared: int
    exact: int
    sliding: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.sequence + self.shared + self.sliding

    @property
    def sequence_bits(self) -> float:
        """Bytes that grow with tokens, in bits per key or value element of the tokens seen."""
        return 16 * self.sequence / max(1, self.exact - self.sliding)

    @property
    def bits(self) -> float:
        """All bytes but `sliding`, likewise."""
        return 16 * (self.total - self.sliding) / max(1, self.exact - self.sliding)


@dataclass(frozen=True)
class Sizes:
    """A recipe on a model whose exact tokens are of `dtype`; a window that may grow is billed at its longest."""

    recipe: Recipe
    geometry: Geometry
    dtype: torch.dtype = torch.bfloat16
    sliding: Sliding = NONE_SLIDE

    @cached_property
    def shared(self) -> int:
        """Bytes of fitted tensors and of rotations; a codec holds the way back beside a rotation that is fitted."""
        found, fixed, beside = 0, list[torch.Tensor](), dict[object, int]()
        for site in self.recipe.sites(self.geometry):
            specs = {} if self.recipe.fits_prompt else site.scheme.tensors(site, self.geometry)
            found += _bytes(specs)
            kind = site.scheme, site.role
            if kind not in beside:
                own = {n: torch.zeros(*shape, dtype=dtype) for n, (shape, dtype) in specs.items() if "rotate." in n}
                codec = Codec(self.recipe, site.layer, site.role, self.geometry, own)
                beside[kind] = storage_bytes(codec.shared) - storage_bytes(own.values()) if own else 0
                fixed += [] if own else codec.shared
            found += beside[kind]
        return found + storage_bytes(fixed)

    @cached_property
    def _fitted_by_row(self) -> int:
        sites = [site for site in self.recipe.sites(self.geometry) if self.recipe.fits(site.scheme)]
        return sum(_bytes(site.scheme.tensors(site, self.geometry)) for site in sites)

    @cached_property
    def _block(self) -> float:
        """Bytes of one block of one row in all layers."""
        sites = self.recipe.sites(self.geometry)
        bits = sum(scheme_bits(self.recipe, site.layer, site.role, self.geometry, self.dtype) for site in sites)
        return bits * self.recipe.window.block * self.geometry.width / 8

    def at(self, tokens: int, batch: int = 1) -> Estimate:
        """Return the bytes that a cache of `batch` rows of `tokens` tokens holds in a step."""
        window = self.recipe.widest.window
        blocks, exact, row = max(0, tokens - window.recent) // window.block, window.recent + window.block, 0
        for policy in self.recipe.policies:
            if (chosen := policy.chosen(tokens, window)) is not None:
                blocks, exact = chosen[0], max(exact, chosen[1])
            row += sum(policy.held_bytes(self.geometry, tokens, window, self.dtype).values())
        elements = 2 * self.geometry.layers * self.geometry.width
        rest = blocks % SLAB
        room = blocks - rest + (1 << (rest - 1).bit_length() if rest else 0)
        row += (exact + window.sinks) * elements * self.dtype.itemsize + round(room * self._block) + self._fitted_by_row
        beside = batch * self.sliding.bytes(tokens)
        return Estimate(tokens, batch, batch * row, self.shared, batch * tokens * elements * 2 + beside, beside)

    def smaller_from(self, batch: int = 1) -> int | None:
        """Return from how many tokens a row on all bytes are fewer than in 16 bits; None: never."""
        tokens, exact = 1 << 24, 4 * batch * self.geometry.layers * self.geometry.width
        while (fewer := (self.at(tokens, batch).total - batch * self.sliding.bytes(tokens)) // exact) < tokens:
            tokens = fewer  # bytes never fall as tokens come: no length above is as large as 16 bits
        return None if tokens == 1 << 24 else tokens + 1


def _bytes(specs: Specs) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())
