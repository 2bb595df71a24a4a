"""Score queries against encoded blocks, and mix their values, without decoding them.

A codec of plain codes decodes group g of token t to  x = (s_tg · y_tg + l_tg) R  with looked-up values y, a scale s, a
low end l (or none) and a rotation back R that all tokens share. So

  q · x        = s_tg (q Rᵀ)_g · y_tg + l_tg Σ (q Rᵀ)_g     the query is rotated once, tokens never
  Σ_t p_t x_t  = (Σ_t p_t s_tg y_tg + Σ_t p_t l_tg) R       the sum is rotated back once

What rotation and groups reach over is a *span*: one or several whole heads. In a span of several heads each head's
query meets the span's tokens alone, by its own rows of Rᵀ, and takes its own columns of R from the sum.

N rows of queries per head · S spans of a token · W elements of a group · M groups of a span · E elements of a span
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages import groups

if TYPE_CHECKING:
    from kvq_runtime.codec import Codec


@dataclass(frozen=True)
class Laid:
    """A run of blocks as a Fold reads it: views of its fields, scales and low ends [B, S, M, 1, T]."""

    codes: Tensor
    scale: Tensor
    low: Tensor | None


@dataclass(frozen=True)
class Fold:
    """How one codec's blocks are attended to as they lie. `turn` is Rᵀ, [D, D], or [heads of a span, D, E]."""

    geometry: Geometry
    quantize: Any
    read: Callable[[Tensor], Tensor]
    span: int
    group: int
    turn: Tensor | None

    def lay(self, fields: Mapping[str, Tensor]) -> Laid:
        """The blocks [B, n, block, ...] of a run."""
        batch = len(fields["codes"])
        shape = (batch, -1, self.geometry.width // self.span, self.span // self.group, 1)
        scale, low = self.quantize.ends(fields)
        scale, low = (x if x is None else x.flatten(1, 2).view(shape).permute(0, 2, 3, 4, 1) for x in (scale, low))
        return Laid(fields["codes"], scale, low)

    def scores(self, q_BHND: Tensor, laid: Laid) -> Tensor:
        """q · x for every token of the blocks: [B, H, N, T]."""
        q_BSMNW = self._groups(q_BHND)
        s_BSMNT = (q_BSMNW @ self._values(laid).mT).mul_(laid.scale.float())
        if laid.low is not None:
            s_BSMNT.addcmul_(q_BSMNW.sum(-1, keepdim=True), laid.low.float())
        s = s_BSMNT.sum(2) if s_BSMNT.shape[2] > 1 else s_BSMNT
        return s.view(*q_BHND.shape[:3], -1)

    def mix(self, p_BHNT: Tensor, laid: Laid) -> Tensor:
        """Σ_t p_t x_t over every token of the blocks: [B, H, N, D]."""
        batch, spans, groups, _, tokens = laid.scale.shape
        p_BS1NT = p_BHNT.reshape(batch, spans, 1, -1, tokens)
        x_BSMNW = (p_BS1NT * laid.scale.float()) @ self._values(laid)
        if laid.low is not None:
            x_BSMNW += torch.linalg.vecdot(p_BS1NT, laid.low.float())[..., None]
        if groups > 1:
            x_BSMNW = x_BSMNW.transpose(2, 3)
        return self._own(x_BSMNW.reshape(*p_BHNT.shape[:3], self.span))

    def _values(self, laid: Laid) -> Tensor:
        """Looked-up values [B, S, M, T, W], float32."""
        batch, spans, groups, _, tokens = laid.scale.shape
        return self.read(laid.codes).view(batch, tokens, spans, groups, self.group).permute(0, 2, 3, 1, 4)

    def _groups(self, q_BHND: Tensor) -> Tensor:
        """Queries turned as the tokens are, group by group, a span's heads side by side: [B, S, M, N · E / D, W]."""
        batch, heads, rows, size = q_BHND.shape
        if self.turn is not None and self.turn.ndim == 2:
            q_BHND = q_BHND @ self.turn
        elif self.turn is not None:
            q_BHND = q_BHND.view(-1, len(self.turn), rows, size) @ self.turn
        if self.group == self.span:
            return q_BHND.view(batch, heads * size // self.span, 1, -1, self.group)
        return q_BHND.view(batch, heads * size // self.span, -1, self.span // self.group, self.group).transpose(2, 3)

    def _own(self, x_BHNE: Tensor) -> Tensor:
        """Of what a head's weights mixed in its span, its own channels, turned back: [B, H, N, D]."""
        if self.turn is None:
            return x_BHNE
        if self.turn.ndim == 2:
            return x_BHNE @ self.turn.mT
        batch, heads, rows, _ = x_BHNE.shape
        return (x_BHNE.view(-1, len(self.turn), rows, self.span) @ self.turn.mT).view(batch, heads, rows, -1)


def fold(codec: Codec, device: torch.device) -> Fold | None:
    """The Fold of a codec; None where blocks have to be decoded: predicted, before RoPE, per channel, mended."""
    side, geometry = codec.side, codec.geometry
    if side.axis != "token" or codec.predictor is not None or side.correct is not None or codec.turns_keys:
        return None
    if not hasattr(side.quantize, "reader"):
        return None
    group = groups.size(side.quantize.group, geometry.width, geometry)
    back = _rotation(side.quantize, geometry, codec.back)
    sizes = (group, geometry.head_size, 1 if back is None else len(back))
    span = max(sizes)
    if geometry.width % span or any(span % size for size in sizes):
        return None
    read = side.quantize.reader(geometry.width, geometry, device)
    return Fold(geometry, side.quantize, read, span, group, _turn(back, span, geometry.head_size, device))


@lru_cache(maxsize=64)
def _rotation(quantize: Any, geometry: Geometry, back: Tensor | None) -> Tensor | None:
    """The rotation back, float32, its rows in the order in which the quantizer's reader gives values; None: none."""
    if not hasattr(quantize, "values_order"):
        return None if back is None else back.float()
    order = quantize.values_order(geometry.width, geometry)
    if back is None and torch.equal(order, torch.arange(len(order))):
        return None
    back = torch.eye(len(order)) if back is None else back.float()
    size = max(len(order), len(back))
    rows = (torch.arange(0, size, len(order))[:, None] + order).flatten().to(back.device)
    return torch.block_diag(*[back] * (size // len(back)))[rows]


@lru_cache(maxsize=64)
def _turn(back_EE: Tensor | None, span: int, size: int, device: torch.device) -> Tensor | None:
    """The rotation of a whole span, transposed, and cut by heads if they are several; None: nothing to do."""
    if back_EE is None and span == size:
        return None
    back_EE = torch.eye(span) if back_EE is None else torch.block_diag(*[back_EE] * (span // len(back_EE)))
    turn = back_EE.mT.contiguous().to(device)
    return turn if span == size else turn.view(-1, size, span)
