"""Bytes of a cache: `report` counts every tensor's storage as allocated; `Sizes` estimates them from shapes, within 2%.

exact     sinks, recent and block tokens, in the model's dtype
blocks    ⌊(T - recent) / block⌋, in slabs of 32, of which the last grows by doubling
policies  what a policy holds beside them, by its `held_bytes`
shared    fitted tensors and rotations: once, whatever the tokens and rows
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.errors import counted
from kvq_runtime.geometry import NONE_SLIDE, SLAB, Geometry, Sliding
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.stage import Specs
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache, and bits per element of keys and values.

    tokens, batch      tokens of a row that the model has seen; rows
    sequence_bytes     bytes that grow with tokens and rows
    shared_bytes       fitted tensors and rotations, which all caches of a recipe in a process share
    exact_bytes        bytes of a 16-bit cache of all tokens seen, sliding_bytes included
    sliding_bytes      of layers that slide over a window, or recur, as many in either cache; not in the bits
    """

    tokens: int
    batch: int
    sequence_bytes: int
    shared_bytes: int
    exact_bytes: int
    sliding_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.sequence_bytes + self.shared_bytes + self.sliding_bytes

    @property
    def bits_per_element(self) -> float:
        """Bytes that grow with tokens, in bits per key or value element of the tokens seen."""
        return 16 * self.sequence_bytes / max(1, self.exact_bytes - self.sliding_bytes)

    @property
    def all_bits(self) -> float:
        """All bytes but `sliding_bytes`, likewise."""
        return 16 * (self.sequence_bytes + self.shared_bytes) / max(1, self.exact_bytes - self.sliding_bytes)


@dataclass(frozen=True)
class MemoryReport(CacheBytes):
    """Memory of a cache, as allocated.

    recipe                    its name
    kept                      tokens of a row that are held, all unless the recipe evicts
    parts                     sequence_bytes by kind
    asymptotic_bits           bits of one more element seen once it is encoded; if the recipe holds a share of the
                              tokens, that share of them
    scratch_peak              most bytes of decoded tensors alive at once so far
    beyond                    share of the blocks encoded since the cache was empty whose error is beyond 99.9% of those
                              in calibration: see store/block_errors.py; None if none is measured
    smaller_than_16bit_from   tokens per row from which the cache is smaller than in 16 bits; None if never
    """

    recipe: str = ""
    kept: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    asymptotic_bits: float = 16.0
    scratch_peak: int = 0
    beyond: float | None = None
    smaller_than_16bit_from: int | None = None

    def with_sliding(self, size: int) -> "MemoryReport":
        """Add the bytes of layers that slide or recur."""
        return replace(self, exact_bytes=self.exact_bytes + size, sliding_bytes=self.sliding_bytes + size)

    def __str__(self) -> str:
        start, total, exact = self.smaller_than_16bit_from, self.total_bytes, self.exact_bytes
        when = "never smaller than 16 bit" if start is None else f"smaller than 16 bit from {start:,} tokens on"
        shared = f"{human(self.shared_bytes)} shared by all caches of the recipe"
        if self.tokens:
            held = "" if self.kept == self.tokens else f", {self.kept:,} of them held,"
            kinds = ", ".join(f"{kind} {human(size)}" for kind, size in self.parts.items() if size)
            slides = f" · {human(self.sliding_bytes)} of layers that slide or recur" if self.sliding_bytes else ""
            ratio = f"{exact / total:.1f} times smaller" if total < exact else f"{total / exact:.1f} times LARGER"
            lines = [
                f"{self.recipe}: {self.tokens:,} tokens{held} x {counted(self.batch, 'row')} hold {human(total)}, "
                f"{ratio} than 16 bit ({human(exact)}){'' if total < exact else '; ' + when}",
                f"of these {human(self.sequence_bytes)} grow with tokens and rows ({kinds}) · {shared}{slides} · "
                f"scratch at most {human(self.scratch_peak)}",
                f"bits per element: {self.asymptotic_bits:.3f} of one more token · {self.bits_per_element:.3f} without "
                f"what is shared · {self.all_bits:.3f} with it",
            ]
        else:
            lines = [f"{self.recipe}: empty, {shared}; {when}"]
        if self.beyond is not None:
            lines.append(f"errors of {self.beyond:.2%} of the blocks are beyond 99.9% of those in calibration")
        return "\n  ".join(lines)


def report(
    recipe: Recipe,
    geometry: Geometry,
    stores: Collection[LayerStore],
    slots: Positions,
    others: Iterable[Mapping[str, int]],
    shared: int,
    dtype: torch.dtype,
    **known: Any,
) -> MemoryReport:
    """Count a cache.

    others   bytes by kind of what it holds beside its layers and their positions
    shared   bytes that do not grow with tokens
    dtype    of exact tokens
    known    the report's fields that the cache knows, as they are
    """
    batch = max((store.rows for store in stores), default=0)
    parts: Counter[str] = Counter()
    for held in (*(layer_bytes(store) for store in stores), {"timeline": slots.bytes()}, *others):
        parts.update(held)
    seen = sum(store.length for store in stores) + slots.dropped * len(stores)
    return MemoryReport(
        recipe=recipe.name,
        batch=batch,
        sequence_bytes=sum(parts.values()),
        shared_bytes=shared,
        exact_bytes=4 * batch * geometry.width * seen,
        parts=dict(parts),
        kept=slots.length,
        asymptotic_bits=asymptotic_bits(recipe, geometry, dtype),
        **known,
    )


def layer_bytes(store: LayerStore) -> dict[str, int]:
    """Allocated bytes by kind."""
    sinks = store.sinks_2BSC.nbytes
    exact = storage_bytes([store.buffer_2BTC, *store.cut.values()])
    parts = Counter({"window": exact - sinks, "sinks": sinks})
    for slab in chain(*store.slabs):
        for name, held in slab.items():
            parts[_kind(name)] += storage_bytes([held])
    if store.index is not None:
        parts["tables"] = storage_bytes(store.index.tensors)
        home = store.index.window_2BTC
        parts["window"] += 0 if home is None or home is store.buffer_2BTC else storage_bytes([home])
    return parts


def asymptotic_bits(recipe: Recipe, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the bits of one more element seen once it is encoded, averaged over layers, keys and values."""
    share = math.prod(policy.held_share() for policy in recipe.policies)
    bits = sum(scheme_bits(recipe, site.layer, site.role, geometry, dtype) for site in recipe.sites(geometry))
    return share * bits / (2 * geometry.layers)


def scheme_bits(recipe: Recipe, layer: int, role, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bits per encoded element of one scheme of one layer, without its fitted tensors."""
    extra = sum(policy.extra_bits(role, dtype) for policy in recipe.policies)
    return extra + recipe.scheme(layer, role).bits(recipe.window.block, geometry, dtype)


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
        fitted, fixed, beside = 0, list[Tensor](), dict[object, int]()
        for site in self.recipe.sites(self.geometry):
            specs = {} if self.recipe.fits_prompt else site.scheme.tensors(site, self.geometry)
            fitted += _bytes(specs)
            kind = site.scheme, site.role
            if kind not in beside:
                rotations = {
                    n: torch.zeros(*shape, dtype=dtype) for n, (shape, dtype) in specs.items() if "rotate." in n
                }
                codec = Codec(self.recipe, site.layer, site.role, self.geometry, rotations)
                beside[kind] = storage_bytes(codec.shared) - storage_bytes(rotations.values()) if rotations else 0
                fixed += [] if rotations else codec.shared
            fitted += beside[kind]
        return fitted + storage_bytes(fixed)

    @cached_property
    def _fitted_by_row(self) -> int:
        sites = [site for site in self.recipe.sites(self.geometry) if self.recipe.fits(site.scheme)]
        return sum(_bytes(site.scheme.tensors(site, self.geometry)) for site in sites)

    @cached_property
    def _block(self) -> float:
        """Bytes of one block of one row in all layers."""
        block, sites = self.recipe.window.block, self.recipe.sites(self.geometry)
        bits = sum(site.scheme.bits(block, self.geometry, self.dtype) for site in sites)
        return bits * block * self.geometry.width / 8

    def at(self, tokens: int, batch: int = 1) -> CacheBytes:
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
        return CacheBytes(tokens, batch, batch * row, self.shared, batch * tokens * elements * 2 + beside, beside)

    def smaller_from(self, batch: int = 1) -> int | None:
        """Return from how many tokens a row on all bytes are fewer than in 16 bits; None: never."""
        tokens, exact = 1 << 24, 4 * batch * self.geometry.layers * self.geometry.width
        while (fewer := (self.at(tokens, batch).total_bytes - batch * self.sliding.bytes(tokens)) // exact) < tokens:
            tokens = fewer  # bytes never fall as tokens come: no length above is as large as 16 bits
        return None if tokens == 1 << 24 else tokens + 1


def _bytes(specs: Specs) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def human(size: float) -> str:
    """Write bytes for people, to three digits, as in 213 KiB."""
    if size < 1024:
        return f"{size:.0f} B"
    unit = next((unit for unit in ("KiB", "MiB") if (size := size / 1024) < 1024), None)
    if unit is None:
        size, unit = size / 1024, "GiB"
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"


def _kind(field: str) -> str:
    """Return the kind of a codec's field."""
    if field in ("codes", "x"):
        return "codes"
    return "outliers" if field.startswith("sparse_") else "scales"
