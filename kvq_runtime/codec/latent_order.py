"""Order the latents of blocks in slabs as the decode kernel reads them, head by head, and back: `KernelOrder` of them.

A head's codes are its slabs of 16 latents, by falling width, each as the tensor core takes it (ops/fragment.py). Gains
stay as they are encoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.kernel_order import SIGNED, inverse, renamed
from kvq_runtime.geometry import Geometry, Role
from kvq_runtime.ops import fragment, pack
from kvq_runtime.stages.stage import Scheme, Specs

MAX_BITS = 7  # of a slab


@dataclass(frozen=True)
class LatentOrder:
    """The kernel's order of the blocks of keys, or of values, of a layer, in as many bytes.

    heads  KV heads
    role   keys are multiplied from the right, by the query, values from the left, by weights
    runs   (slabs of a head, bits), by falling bits

    Shapes: [B, n, ...], n blocks · H heads · J slabs of a run · T = 128 tokens. Channel r of a run's head h is encoded
    as the run's channel r · H + h.
    """

    heads: int
    role: Role
    runs: tuple[tuple[int, int], ...]

    def arranged(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Order fields [B, n, ...] of a codec for slabs: codes become [B, n, H, bytes]."""
        packed, parts, start = fields["codes"], [], 0
        for slabs, bits in self.runs:
            size = pack.packed_size(fragment.SLAB_TOKENS, bits)
            run = packed[..., start : start + slabs * fragment.EDGE * self.heads * size]
            start += run.shape[-1]
            run = run.unflatten(-1, (slabs, fragment.EDGE, self.heads, size)).movedim(-2, -4)
            codes_TR = renamed(pack.unpack(run, bits, fragment.SLAB_TOKENS), SIGNED.get(bits, ())).mT
            parts.append(fragment.arrange(codes_TR, fragment.slab_order(bits), self.rows).flatten(-2))
        return dict(fields) | {"codes": torch.cat(parts, -1)}

    def collected(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `arranged`."""
        ordered, parts, start = fields["codes"], [], 0
        for slabs, bits in self.runs:
            order = fragment.slab_order(bits)
            run = ordered[..., start : start + slabs * order.BYTES].unflatten(-1, (slabs, order.BYTES))
            start += slabs * order.BYTES
            codes_TR = renamed(fragment.collect(run, order, self.rows), inverse(SIGNED.get(bits, ())))
            parts.append(pack.pack(codes_TR.mT, bits).movedim(-4, -2).flatten(2))
        return dict(fields) | {"codes": torch.cat(parts, -1)}

    def specs(self, encoded: Specs) -> Specs:
        """Return the fields of a block as they are arranged, of those that a codec encodes."""
        (size,), dtype = encoded["codes"]
        return dict(encoded) | {"codes": ((self.heads, size // self.heads), dtype)}

    @property
    def rows(self) -> str:
        """Rows of the operand: what is not summed over."""
        return "tokens" if self.role == "key" else "channels"


def latent_order(scheme: Scheme, block: int, geometry: Geometry, role: Role) -> LatentOrder | None:
    """Return the order of latents of a basis a head, in slabs of whole heads; None: they stay as they are encoded.

    Of a recipe whose counts are yet to be fitted the runs are left out.
    """
    quantize: Any = scheme.quantize
    heads = geometry.kv_heads
    if not quantize.takes_latents or getattr(scheme.rotate, "group", "all") != "head":
        return None
    if quantize.slab % fragment.EDGE or quantize.codebook != "stepped" or block != fragment.SLAB_TOKENS:
        return None
    runs = quantize.runs(geometry.width) if quantize.counts else []
    unit = heads * fragment.EDGE
    if quantize.bits[0] > MAX_BITS or any(count % unit for count, _ in runs):
        return None
    if quantize.gain and quantize.gain_count(heads) != heads:
        return None
    return LatentOrder(heads, role, tuple((count // unit, bits) for count, bits in runs))
