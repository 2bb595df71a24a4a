"""Report what a cache holds, in bytes: nothing estimated, every tensor's storage counted as allocated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.errors import counted
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a cache: bytes as allocated, bits per element of keys and values, tokens per row.

    recipe, batch             name of the recipe; rows
    total_bytes               sequence_bytes + shared_bytes + sliding_bytes
    exact_bytes               bytes of a 16-bit cache of all tokens seen, sliding_bytes included
    sliding_bytes             of layers that slide over a window, or recur; not in the bits
    tokens, kept              tokens of a row that the model has seen; those that are held, all unless the recipe evicts
    bits_per_element          sequence_bytes, in bits per key or value element of the tokens seen
    all_bits                  total_bytes, in bits per key or value element of the tokens seen
    asymptotic_bits           bits of one more element seen once it is encoded; if the recipe holds a share of the
                              tokens, that share of them
    sequence_bytes            bytes that grow with tokens and batch; `parts` has them by kind
    shared_bytes              the artifact's tensors and rotations, which all caches of it in a process share
    scratch_peak              most bytes of decoded tensors alive at once so far
    beyond                    share of the blocks encoded since the cache was empty whose error is beyond 99.9% of those
                              in calibration: see store/block_errors.py; None if none is measured
    smaller_than_16bit_from   tokens per row from which the cache is smaller than in 16 bits; None if never
    dtype                     of exact tokens
    """

    recipe: str
    tokens: int
    batch: int
    total_bytes: int
    exact_bytes: int
    bits_per_element: float
    all_bits: float
    asymptotic_bits: float
    sequence_bytes: int
    shared_bytes: int
    scratch_peak: int
    smaller_than_16bit_from: int | None
    parts: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    dtype: str = "bfloat16"
    beyond: float | None = None
    sliding_bytes: int = 0

    def with_sliding(self, size: int) -> MemoryReport:
        """Add the bytes of layers that slide or recur, as many in either cache."""
        total, exact = self.total_bytes + size, self.exact_bytes + size
        return replace(self, total_bytes=total, exact_bytes=exact, sliding_bytes=self.sliding_bytes + size)

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
        if self.dtype == "float32":
            lines.append("exact tokens are in float32, and count twice; a cache of bfloat16 is smaller sooner")
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
    each = 2 * batch * geometry.width
    elements = each * (sum(store.length for store in stores) + slots.dropped * len(stores))
    sequence = sum(parts.values())
    return MemoryReport(
        recipe=recipe.name,
        batch=batch,
        total_bytes=sequence + shared,
        exact_bytes=2 * elements,
        bits_per_element=8 * sequence / max(1, elements),
        all_bits=8 * (sequence + shared) / max(1, elements),
        asymptotic_bits=asymptotic_bits(recipe, geometry, dtype),
        sequence_bytes=sequence,
        shared_bytes=shared,
        parts=dict(parts),
        kept=slots.length,
        dtype=str(dtype).removeprefix("torch."),
        **known,
    )


def layer_bytes(store: LayerStore) -> dict[str, int]:
    """Allocated bytes by kind, which the stage of a field decides; fields of policies are kinds of their own."""
    sinks = store.sinks_2BSC.nbytes
    parts = Counter({"window": storage_bytes([store.buffer_2BTC]) - sinks, "sinks": sinks})
    kinds = [codec.scheme.memory_kinds(store.window.block, codec.geometry) for codec in store.codecs]
    for slabs, kind_of in zip(store.slabs, [*kinds, {}], strict=True):
        for slab in slabs:
            for name, held in slab.items():
                parts[kind_of.get(name, name)] += storage_bytes([held])
    if store.index is not None:
        parts["tables"] = storage_bytes(store.index.tensors)
        home = store.index.window_2BTC
        parts["window"] += 0 if home is None or home is store.buffer_2BTC else storage_bytes([home])
    return parts


def shared_bytes(codecs: Iterable[Codec], others: Sequence[Tensor] = ()) -> int:
    """Count the bytes of fitted tensors and rotations, and of others, each storage once."""
    return storage_bytes([*others, *(tensor for codec in codecs for tensor in codec.shared)])


def asymptotic_bits(recipe: Recipe, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the bits of one more element seen once it is encoded, averaged over layers, keys and values."""
    share = math.prod(policy.held_share() for policy in recipe.policies)
    bits = sum(scheme_bits(recipe, site.layer, site.role, geometry, dtype) for site in recipe.sites(geometry))
    return share * bits / (2 * geometry.layers)


def scheme_bits(recipe: Recipe, layer: int, role, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bits per encoded element of one scheme of one layer, without its fitted tensors."""
    extra = sum(policy.extra_bits(role, dtype) for policy in recipe.policies)
    return extra + recipe.scheme(layer, role).bits(recipe.window.block, geometry, dtype)


def human(size: float) -> str:
    """Write bytes for people, to three digits, as in 213 KiB."""
    if size < 1024:
        return f"{size:.0f} B"
    unit = next((unit for unit in ("KiB", "MiB") if (size := size / 1024) < 1024), None)
    if unit is None:
        size, unit = size / 1024, "GiB"
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
