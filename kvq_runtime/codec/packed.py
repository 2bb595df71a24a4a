"""Score queries against encoded blocks, and mix their values, without decoding them.

A codec of plain codes decodes group g of token t to  x = (s_tg · y_tg + l_tg) R  with looked-up values y, a scale s, a
low end l (or none) and a rotation back R that all tokens share. So

  q · x        = s_tg (q Rᵀ)_g · y_tg + l_tg Σ (q Rᵀ)_g     the query is rotated once, tokens never
  Σ_t p_t x_t  = (Σ_t p_t s_tg y_tg + Σ_t p_t l_tg) R       the sum is rotated back once

What rotation and groups reach over is a *span*: one or several whole heads. In a span of several heads each head's
query is multiplied with the span's tokens alone, by its own rows of Rᵀ, and takes its own columns of R from the sum.

Y = B · H rows of heads · N queries per head · S spans of a token · E elements of a span · M groups of a span · W
elements of a group · Z = B · S · M
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import PackedCodes
from kvq_runtime.stages.stage import Scheme


@dataclass(frozen=True)
class PackedBlocks:
    """A run of blocks as a PackedReader reads it: codes, scales and low ends [Z, 1, T]; views, for a single row.

    groups and heads are Z and Y, kept as numbers: a step needs them often, and reading a tensor's shape is slow.
    """

    batch: int
    groups: int
    heads: int
    tokens: int
    codes: Tensor
    scale: Tensor
    low: Tensor | None


@dataclass(frozen=True)
class PackedReader:
    """Attention to one codec's blocks without decoding them.

    `turn` is Rᵀ: [D, D], or [heads of a span, D, E].
    """

    geometry: Geometry
    packed: PackedCodes
    span: int
    turn: Tensor | None
    by_group: ClassVar[bool] = True  # how slabs lie: the ends of groups by group

    @cached_property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.packed.group

    def view_blocks(self, fields: Mapping[str, Tensor], first: int) -> PackedBlocks:
        """Return the blocks [B, n, block, ...] of a run, from token `first` on."""
        fields = {name: field.flatten(1, 2)[:, first:] for name, field in fields.items()}
        scale_BTM, low_BTM = self.packed.ends(fields)
        batch, tokens, groups = scale_BTM.shape
        scale = scale_BTM.mT.reshape(-1, 1, tokens)
        low = None if low_BTM is None else low_BTM.mT.reshape(-1, 1, tokens)
        return PackedBlocks(batch, batch * groups, batch * self.geometry.kv_heads, tokens, fields["codes"], scale, low)

    def scores(self, q_YND: Tensor, packed_blocks: PackedBlocks, angles: object = None) -> Tensor:
        """q · x for every token of the blocks: [Y, N, T]. `angles` are for readers whose keys turn."""
        q_ZNW = self._groups(q_YND, packed_blocks)
        s_ZNT = _product(q_ZNW, self._values(packed_blocks).mT).mul_(packed_blocks.scale)
        if packed_blocks.low is not None:
            s_ZNT.addcmul_(q_ZNW.sum(-1, True), packed_blocks.low)
        if self.group < self.span:
            s_ZNT = s_ZNT.view(-1, self.span // self.group, *s_ZNT.shape[1:]).sum(1)
        one_head = self.span == self.geometry.head_size
        return s_ZNT if one_head else s_ZNT.view(packed_blocks.heads, -1, packed_blocks.tokens)

    def mix(self, p_YNT: Tensor, packed_blocks: PackedBlocks) -> Tensor:
        """Σ_t p_t x_t over every token of the blocks: [Y, N, D]."""
        p_ZNT, y_BMTW = self._weights(p_YNT, packed_blocks), self._values(packed_blocks)
        if packed_blocks.low is None:
            x_ZNW = _product(p_ZNT * packed_blocks.scale, y_BMTW)
        else:
            low_ZN1 = torch.bmm(p_ZNT, packed_blocks.low.float().mT)
            x_ZNW = _product(p_ZNT * packed_blocks.scale, y_BMTW).add_(low_ZN1)
        if self.group < self.span:
            x_ZNW = x_ZNW.view(-1, self.span // self.group, *x_ZNW.shape[1:]).transpose(1, 2)
        x_YNE = x_ZNW.reshape(packed_blocks.heads, -1, self.span)
        return x_YNE if self.turn is None else _turned(x_YNE, self.turn.mT)

    def _values(self, packed_blocks: PackedBlocks) -> Tensor:
        """Looked-up values [B, groups of a token, T, W], float32, as they lie: token by token."""
        y = self.packed.read(packed_blocks.codes)
        return y.view(packed_blocks.batch, packed_blocks.tokens, -1, self.group).transpose(1, 2)

    def _weights(self, p_YNT: Tensor, packed_blocks: PackedBlocks) -> Tensor:
        """Weights by group, a span's heads side by side: [Z, N · E / D, T]."""
        groups = self.span // self.group
        p = p_YNT.reshape(packed_blocks.groups // groups, -1, packed_blocks.tokens)
        if groups == 1:
            return p
        return p[:, None].expand(-1, groups, -1, -1).reshape(packed_blocks.groups, -1, packed_blocks.tokens)

    def _groups(self, q_YND: Tensor, packed_blocks: PackedBlocks) -> Tensor:
        """Queries turned as the tokens are, group by group, a span's heads side by side: [Z, N · E / D, W]."""
        q = q_YND if self.turn is None else _turned(q_YND, self.turn)
        if self.group < self.span:
            groups = self.span // self.group
            q = q.view(packed_blocks.groups // groups, -1, groups, self.group).transpose(1, 2)
        return q.reshape(packed_blocks.groups, -1, self.group)


def _product(x_ZNA: Tensor, y_BMAX: Tensor) -> Tensor:
    """Multiply rows [Z, N, A] by the matrices of all rows' groups, Z = B · M, where they lie: [Z, N, X]."""
    rows, groups = y_BMAX.shape[:2]
    if rows == 1:
        return torch.bmm(x_ZNA, y_BMAX[0])
    x_BMNA = x_ZNA.unflatten(0, (rows, groups))
    return torch.stack([torch.bmm(x_BMNA[:, at], y_BMAX[:, at]) for at in range(groups)], 1).flatten(0, 1)


def _turned(x_YNA: Tensor, turn: Tensor) -> Tensor:
    """Rows times a matrix [A, B], or each head's times its own, [heads of a span, A, B]: [Y, N, B]."""
    if turn.ndim == 2:
        return x_YNA @ turn
    return (x_YNA.view(-1, len(turn), *x_YNA.shape[1:]) @ turn).flatten(0, 1)


def packed_reader(scheme: Scheme, geometry: Geometry, back: Tensor | None, device: torch.device) -> PackedReader | None:
    """Return the reader of a scheme; None where blocks have to be decoded: predicted, per channel, or corrected, or
    with a rotation for each head.

    back   what rotates a run of decoded elements, in stored order, back; or None
    """
    if scheme.axis != "token" or scheme.predict is not None or scheme.correct is not None:
        return None
    codes = scheme.quantize.packed(geometry.width, geometry, device)
    if codes is None or (back is not None and back.ndim == 3):
        return None
    group, back = codes.group, _rotation(codes.order, back)
    head, turned = geometry.head_size, 1 if back is None else len(back)
    span = max(group, head, turned)
    if geometry.width % span or span % group or span % head or span % turned:
        return None
    return PackedReader(geometry, codes._replace(order=None), span, _turn(back, span, geometry.head_size, device))


@constant(64)
def _rotation(order: Tensor | None, back: Tensor | None) -> Tensor | None:
    """Return the rotation back, float32, its rows in the order in which packed codes are read; None: there is none."""
    if order is None:
        return None if back is None else back.float()
    if back is None and torch.equal(order, torch.arange(len(order))):
        return None
    back = torch.eye(len(order), dtype=torch.float32) if back is None else back.float()
    size = math.lcm(len(order), len(back))  # both divide a token
    rows = (torch.arange(0, size, len(order))[:, None] + order).flatten().to(back.device)
    return torch.block_diag(*[back] * (size // len(back)))[rows]


@constant(64)
def _turn(back_EE: Tensor | None, span: int, size: int, device: torch.device) -> Tensor | None:
    """Return the rotation of a whole span, transposed, and cut by heads if they are several; None: nothing to do."""
    if back_EE is None and span == size:
        return None
    parts = [torch.eye(span, dtype=torch.float32)] if back_EE is None else [back_EE] * (span // len(back_EE))
    turn = torch.block_diag(*parts).mT.contiguous().to(device)
    return turn if span == size else turn.view(-1, size, span)
