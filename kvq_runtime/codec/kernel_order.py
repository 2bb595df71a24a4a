"""Order the codes of blocks in slabs as the decode kernel reads them, and back; artifacts know nothing of it.

Codes lie as the tensor core takes them (ops/fragment.py), head by head; beside them, contiguous, the numbers of a head:
of channels, group after group of tokens, or of tokens, group after group of channels. Codes of a codebook are stored as
a kernel looks them up in registers: of a symmetric one by sign and magnitude.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, Role
from kvq_runtime.ops import fragment, pack
from kvq_runtime.ops.constant import constant
from kvq_runtime.stages.stage import Scheme, Specs


@dataclass(frozen=True)
class KernelOrder:
    """The kernel's order of the blocks of keys, or of values, of a layer.

    geometry   of the model, and `block`, the tokens of a block
    role       keys are multiplied from the right, by the query, values from the left, by weights: see `rows`
    axis       of its scheme: "channel", a scale for each channel and group of tokens; "token"
    group      tokens, or channels, with one scale
    order      of a head's block
    elements   that a code stands for: 2, channels c and c + D / 2, or 1
    stored     what each code is stored as; (): as it is

    Shapes: [B, n, ...], n blocks · H heads · T tokens of a block · D codes of a head's token · M groups.
    """

    geometry: Geometry
    block: int
    role: Role
    axis: str
    group: int
    order: fragment.Order
    elements: int = 1
    stored: tuple[int, ...] = ()

    def arranged(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Order fields [B, n, ...] of a codec for slabs, in as many bytes.

        Codes become [B, n, H, bytes], numbers [B, n, H, M, D] (axis "channel") or [B, n, H, M, T].
        """
        numbers = {name: self._numbers(x) for name, x in fields.items() if name != "codes"}
        return {"codes": fragment.arrange(self._codes(fields["codes"]), self.order, self.rows)} | numbers

    def collected(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `arranged`."""
        codes_TD = renamed(fragment.collect(fields["codes"], self.order, self.rows), inverse(self.stored))
        by_channel = self.axis == "channel"
        rows = codes_TD.mT.flatten(-3, -2) if by_channel else codes_TD.transpose(-3, -2).flatten(-2)
        collected = {"codes": pack.pack(rows.unflatten(-1, (-1, self.group // self.elements)), self.order.BITS)}
        for name, x in fields.items():
            if name != "codes" and by_channel:
                collected[name] = x.mT.flatten(-3, -2)
            elif name != "codes":
                collected[name] = x.permute(0, 1, 4, 2, 3).flatten(-2)
        return collected

    def specs(self, encoded: Specs) -> Specs:
        """Return the fields of a block as they are arranged, of those that a codec encodes."""
        heads = self.geometry.kv_heads
        arranged: Specs = {}
        for name, (shape, dtype) in encoded.items():
            if name == "codes":
                arranged[name] = (heads, self.order.SUBS * self.order.BYTES), dtype
            elif self.axis == "channel":
                arranged[name] = (heads, shape[1], shape[0] // heads), dtype
            else:
                arranged[name] = (heads, shape[1] // heads, shape[0]), dtype
        return arranged

    @property
    def rows(self) -> str:
        """Rows of the operand: what is not summed over."""
        return "tokens" if self.role == "key" else "channels"

    def _codes(self, codes: Tensor) -> Tensor:
        """[B, n, H, T, D]"""
        x = renamed(pack.unpack(codes, self.order.BITS, self.group // self.elements).flatten(-2), self.stored)
        heads = (self.geometry.kv_heads, self.geometry.head_size // self.elements)
        if self.axis == "channel":
            return x.unflatten(-2, heads).mT
        return x.unflatten(-1, heads).transpose(-3, -2)

    def _numbers(self, x: Tensor) -> Tensor:
        heads = self.geometry.kv_heads
        if self.axis == "channel":
            return x.unflatten(-2, (heads, -1)).mT.contiguous()
        return x.unflatten(-1, (heads, -1)).permute(0, 1, 3, 4, 2).contiguous()


def kernel_order(scheme: Scheme, block: int, geometry: Geometry, role: Role) -> KernelOrder | None:
    """The order of a scheme's codes; None where they stay as they are encoded: no kernel reads these otherwise."""
    quantize: Any = scheme.quantize  # one that a kernel reads has groups and bits
    size, elements = geometry.head_size, 1
    if quantize.kernel not in ("uniform", "lloyd", "grid"):
        return None
    channel = scheme.axis == "channel"
    group = quantize.group_size(block if channel else geometry.width, geometry)
    if group % fragment.EDGE or group > (block if channel else size) or (channel and group & (group - 1)):
        return None
    if quantize.kernel != "uniform" and channel:
        return None
    if quantize.kernel == "grid":
        elements = quantize.dim
        if elements != 2 or quantize.bits != 4 or group != size:  # what registers have room for
            return None
    order = fragment.order(quantize.bits, block, size // elements, 1 if channel else size // group)
    stored = SIGNED[quantize.bits] if quantize.kernel == "lloyd" else ()
    return order and KernelOrder(geometry, block, role, scheme.axis, group, order, elements, stored)


# codes of a symmetric codebook, the negative half first, as sign (set where positive) and magnitude: of 3 bits the sign
# is the lowest bit, which has a plane of its own
SIGNED: dict[int, tuple[int, ...]] = {
    1: (), 2: (), 3: (6, 4, 2, 0, 1, 3, 5, 7), 4: (7, 6, 5, 4, 3, 2, 1, 0, 8, 9, 10, 11, 12, 13, 14, 15)
}  # fmt: skip


def inverse(stored: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(stored)), key=stored.__getitem__))


def renamed(codes: Tensor, names: tuple[int, ...]) -> Tensor:
    """Return each code's entry of a table; without a table the codes."""
    return _table(names, codes.device)[codes.int()] if names else codes


@constant(32)
def _table(names: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(names, dtype=torch.uint8, device=device)
