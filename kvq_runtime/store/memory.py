"""Report what a cache holds, in bytes: nothing estimated, every tensor's storage counted as allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_runtime import codec as codecs
from kvq_runtime.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import HALVES, Recipe, presets
from kvq_runtime.stages.select import Chunks, Heavy

if TYPE_CHECKING:
    from kvq_runtime.cache import BlockCache


@dataclass(frozen=True)
class MemoryReport:
    """What a cache holds.

    total_bytes        sequence_bytes + shared_bytes
    exact_bytes        what a 16-bit cache of all tokens seen holds
    tokens, kept       tokens of a row that the model has seen, and those that are held: all, unless the recipe selects
    bits_per_element   sequence_bytes, in bits per key or value element of the tokens seen
    bits_per_kept      sequence_bytes, in bits per key or value element of the tokens held
    all_bits           total_bytes, in bits per key or value element of the tokens seen
    asymptotic_bits    what one more element seen costs once it is encoded, in a cache of the model's dtype: of a recipe
                       that holds a share of the tokens, that share
    sequence_bytes     grow with tokens and batch; `parts` has them by kind
    shared_bytes       the artifact's tensors and rotations, once per process
    scratch_peak       most bytes of decoded tensors alive at once so far
    escaped, clipped   tokens of keys or values, over all layers, that are stored by the 8-bit escape; and that were to
                       be, but found no slot left in their block
    smaller_from       tokens (batch 1) from which all bytes are fewer than those of the plain HIGGS recipe of the next
                       width at or above the recipe's asymptotic bits; None if never
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
    smaller_from: int | None
    parts: dict[str, int] = field(default_factory=dict)
    escaped: int = 0
    clipped: int = 0
    kept: int = 0
    bits_per_kept: float = 0.0

    @staticmethod
    def of(cache: BlockCache) -> MemoryReport:
        """Count a cache."""
        parts: dict[str, int] = {}
        batch, elements, missing, dtype, escaped, clipped = 0, 0, 0, torch.bfloat16, 0, 0
        for pair in cache.layers.values():
            for stream in pair:
                batch, dtype = stream.rows, stream.sinks_BSC.dtype
                elements += batch * (stream.length + cache.timeline.dropped) * cache.geometry.width
                missing += batch * cache.timeline.dropped * cache.geometry.width
                for kind, size in stream.bytes().items():
                    parts[kind] = parts.get(kind, 0) + size
                served, wanted = stream.escapes()
                escaped, clipped = escaped + served, clipped + wanted - served
        own = [*cache.timeline.tensors, *(cache.votes.tensors if cache.votes is not None else ())]
        if cache.online is not None:
            parts |= cache.online.bytes()
        tables = sum(tensor.untyped_storage().nbytes() for tensor in cache.fused.tensors)
        parts |= {"tables": parts.get("tables", 0) + tables} if tables else {}
        parts["timeline"] = sum(tensor.untyped_storage().nbytes() for tensor in own)
        if cache.hitters is not None:
            parts["selection"] = sum(tensor.untyped_storage().nbytes() for tensor in cache.hitters.tensors)
        shared = shared_bytes([codec for pair in cache.codecs for codec in pair], cache.fused.shared)
        sequence = sum(parts.values())
        return MemoryReport(
            recipe=cache.recipe.name,
            tokens=cache.length,
            batch=batch,
            total_bytes=sequence + shared,
            exact_bytes=2 * elements,
            bits_per_element=8 * sequence / max(1, elements),
            all_bits=8 * (sequence + shared) / max(1, elements),
            asymptotic_bits=asymptotic_bits(cache.recipe, cache.geometry, dtype),
            sequence_bytes=sequence,
            shared_bytes=shared,
            scratch_peak=cache.scratch_peak,
            smaller_from=smaller_from(cache.recipe, cache.geometry, shared),
            parts=parts,
            escaped=escaped,
            clipped=clipped,
            kept=cache.timeline.length,
            bits_per_kept=8 * sequence / max(1, elements - missing),
        )

    def as_dict(self) -> dict:
        """Plain numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = self.exact_bytes / max(1, self.total_bytes)
        held = "" if self.kept == self.tokens else f", {self.kept} of them held,"
        kinds = ", ".join(f"{kind} {_human(size)}" for kind, size in self.parts.items() if size)
        return (
            f"{self.recipe}: {self.tokens} tokens{held} x {self.batch} rows hold {_human(self.total_bytes)}; "
            f"16 bit would hold {_human(self.exact_bytes)} ({ratio:.1f} times as much)\n"
            f"  sequence {_human(self.sequence_bytes)} ({kinds}) · shared {_human(self.shared_bytes)} · "
            f"scratch at most {_human(self.scratch_peak)}\n"
            f"  bits per element: {self.asymptotic_bits:.3f} asymptotic · {self.bits_per_element:.3f} sequence now · "
            f"{self.all_bits:.3f} all now"
        )


def shared_bytes(codecs: list[Codec], others: Sequence[Tensor] = ()) -> int:
    """Bytes of fitted tensors and rotations, and of others, each storage once."""
    tensors = [*others, *(tensor for codec in codecs for tensor in codec.shared)]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def asymptotic_bits(recipe: Recipe, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """What one more element seen costs once it is encoded, on average over layers, keys and values."""
    bits, share = 0.0, recipe.select.share if isinstance(recipe.select, Heavy) else 1.0
    for layer in range(geometry.layers):
        for half in HALVES:
            bits += side_bits(recipe, layer, half, geometry, dtype)
    return share * bits / (2 * geometry.layers)


def side_bits(recipe: Recipe, layer: int, half, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bits per encoded element of one side of one layer, without its fitted tensors."""
    marks = recipe.select.bits(dtype) if half == "key" and isinstance(recipe.select, Chunks) else 0.0
    return marks + codecs.bits(recipe.side(layer, half), geometry, dtype)


def smaller_from(recipe: Recipe, geometry: Geometry, shared: int) -> int | None:
    """Tokens from which a recipe's bytes are fewer than those of plain HIGGS at the next width (see MemoryReport)."""
    own = asymptotic_bits(recipe, geometry)
    plain = {
        name: asymptotic_bits(other, geometry)
        for name, other in presets().items()
        if name.startswith("higgs-") and "head" not in name and not _refused(other, geometry)
    }
    wider = [bits for name, bits in plain.items() if bits >= own and name != recipe.name]
    if not wider or recipe.name in plain:
        return None
    gain = (min(wider) - own) * 2 * geometry.layers * geometry.width / 8
    return None if gain <= 0 else -int(-shared // gain)


def _refused(recipe: Recipe, geometry: Geometry) -> bool:
    try:
        recipe.check(geometry)
    except ValueError:
        return True
    return False


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
