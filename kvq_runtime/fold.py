"""Score queries against encoded blocks, and mix their values, without decoding them.

A codec of plain codes decodes group g of token t to  x = (s_tg · y_tg + l_tg) R  with looked-up values y, a scale s, a
low end l (or none) and a rotation back R that all tokens share. So

  q · x        = s_tg (q Rᵀ)_g · y_tg + l_tg Σ (q Rᵀ)_g     the query is rotated once, tokens never
  Σ_t p_t x_t  = (Σ_t p_t s_tg y_tg + Σ_t p_t l_tg) R       the sum is rotated back once

What rotation and groups reach over is a *span*: one or several whole heads. In a span of several heads each head's
query stands alone in its own place, with zeros in the others'.

N rows of queries per head · S spans of a token · W elements of a group · M groups of a span · E elements of a span ·
Z = B · S · M
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages import groups

if TYPE_CHECKING:
    from kvq_runtime.codec import Codec

Fields = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fold:
    """How one codec's blocks are attended to as they lie. `fields` are those of blocks [B, n, block, ...]."""

    codec: Codec
    span: int
    group: int
    turn: Tensor | None

    def scores(self, q_BHND: Tensor, fields: Fields) -> Tensor:
        """q · x for every token of the blocks: [B, H, N, T]."""
        batch, heads, rows, _ = q_BHND.shape
        q_ZNW = self._groups(self._spread(q_BHND))
        y_ZTW, scale_BSM1T, low_BSM1T = self._tokens(fields)
        s = torch.bmm(q_ZNW, y_ZTW.mT).view(*scale_BSM1T.shape[:3], -1, y_ZTW.shape[1]).mul_(scale_BSM1T)
        if low_BSM1T is not None:
            s.addcmul_(q_ZNW.sum(-1).view(*s.shape[:4], 1), low_BSM1T)
        s = s if s.shape[2] == 1 else s.sum(2)
        return s.view(batch, heads, rows, -1)

    def mix(self, p_BHNT: Tensor, fields: Fields) -> Tensor:
        """Σ_t p_t x_t over every token of the blocks: [B, H, N, D]."""
        y_ZTW, scale_BSM1T, low_BSM1T = self._tokens(fields)
        batch, spans, groups, _, tokens = scale_BSM1T.shape
        p_BS1NT = p_BHNT.reshape(batch, spans, 1, -1, tokens)
        x_ZNW = torch.bmm((p_BS1NT * scale_BSM1T).flatten(0, 2), y_ZTW)
        if low_BSM1T is not None:
            x_ZNW += (p_BS1NT * low_BSM1T).sum(-1).flatten(0, 2)[..., None]
        x_BSNE = x_ZNW.view(batch, spans, groups, -1, self.group).transpose(2, 3).reshape(batch, spans, -1, self.span)
        if self.turn is not None:
            x_BSNE = (x_BSNE.view(-1, len(self.turn)) @ self.turn).view(x_BSNE.shape)
        return self._own(x_BSNE, p_BHNT.shape[2])

    def _groups(self, q_BSNE: Tensor) -> Tensor:
        """Queries turned as the tokens are, group by group: [B · S · M, N, W]."""
        batch, spans, rows, _ = q_BSNE.shape
        if self.turn is not None:
            q_BSNE = q_BSNE.reshape(-1, len(self.turn)) @ self.turn.mT
        if self.group == self.span:
            return q_BSNE.reshape(batch * spans, rows, self.span)
        return q_BSNE.view(batch * spans, rows, -1, self.group).transpose(1, 2).reshape(-1, rows, self.group)

    def _tokens(self, fields: Fields) -> tuple[Tensor, Tensor, Tensor | None]:
        """Looked-up values [B · S · M, T, W], scales and low ends [B, S, M, 1, T], in float32."""
        codec = self.codec
        batch, width = fields["codes"].shape[0], codec.geometry.width
        y, scale, low = codec.side.quantize.terms(fields, width, codec.geometry)
        shape = (batch, -1, width // self.span, self.span // self.group)
        y = y.float().view(*shape, self.group).permute(0, 2, 3, 1, 4)
        scale, low = (x if x is None else x.view(*shape, 1).permute(0, 2, 3, 4, 1) for x in (scale, low))
        assert scale is not None
        return y.reshape(-1, *y.shape[3:]), scale, low

    def _spread(self, q_BHND: Tensor) -> Tensor:
        """Queries in the place of their own head within a span: [B, S, heads · N, E]."""
        batch, heads, rows, size = q_BHND.shape
        inside = self.span // size
        if inside == 1:
            return q_BHND
        q = q_BHND.new_zeros(batch, heads // inside, inside, rows, inside, size)
        q.diagonal(dim1=2, dim2=4).copy_(q_BHND.unflatten(1, (-1, inside)).permute(0, 1, 3, 4, 2))
        return q.view(batch, heads // inside, inside * rows, self.span)

    def _own(self, x_BSNE: Tensor, rows: int) -> Tensor:
        """Of what a head's weights mixed in its span, its own channels: [B, H, N, D]."""
        size = self.codec.geometry.head_size
        inside = self.span // size
        if inside == 1:
            return x_BSNE
        x = x_BSNE.view(*x_BSNE.shape[:2], inside, rows, inside, size).diagonal(dim1=2, dim2=4)
        return x.permute(0, 1, 4, 2, 3).flatten(1, 2)


def fold(codec: Codec, device: torch.device) -> Fold | None:
    """The Fold of a codec; None where blocks have to be decoded: predicted, before RoPE, per channel, mended."""
    side, geometry = codec.side, codec.geometry
    if side.axis != "token" or codec.predictor is not None or side.correct is not None or codec.turns_keys:
        return None
    if not hasattr(side.quantize, "terms"):
        return None
    group = groups.size(side.quantize.group, geometry.width, geometry)
    turn = _turn(side.quantize, geometry, codec.back, device)
    sizes = (group, geometry.head_size, 1 if turn is None else len(turn))
    span = max(sizes)
    if geometry.width % span or any(span % size for size in sizes):
        return None
    return Fold(codec, span, group, turn)


@lru_cache(maxsize=64)
def _turn(quantize: Any, geometry: Geometry, back: Tensor | None, device: torch.device) -> Tensor | None:
    """The rotation back, float32, its rows in the order in which the quantizer gives its terms; None: nothing to do."""
    if not hasattr(quantize, "terms_order"):
        return None if back is None else back.float()
    order = quantize.terms_order(geometry.width, geometry)
    if back is None and torch.equal(order, torch.arange(len(order))):
        return None
    back = torch.eye(len(order), device=device) if back is None else back.float()
    size = max(len(order), len(back))
    rows = (torch.arange(0, size, len(order))[:, None] + order).flatten().to(device)
    return torch.block_diag(*[back] * (size // len(back)))[rows]
