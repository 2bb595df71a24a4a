"""Score queries against encoded blocks, and mix their values, without decoding them.

A codec of plain codes decodes group g of token t to  x = (s_tg · y_tg + l_tg) R  with looked-up values y, a scale s, a
low end l (or none) and a rotation back R that all tokens share. So

  q · x        = s_tg (q Rᵀ)_g · y_tg + l_tg Σ (q Rᵀ)_g     the query is rotated once, tokens never
  Σ_t p_t x_t  = (Σ_t p_t s_tg y_tg + Σ_t p_t l_tg) R       the sum is rotated back once

What rotation and groups reach over is a *span*: one or several whole heads. In a span of several heads each head's
query stands alone in its own place, with zeros in the others'.

N rows of queries per head · S spans of a token · W elements of a group · M groups of a span · E elements of a span
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.codec import Codec
from kvq_runtime.stages import groups

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
        q_BSNE = self._spread(q_BHND)
        q_BSNE = q_BSNE if self.turn is None else _turned(q_BSNE, self.turn.mT)
        q_BSMNW = q_BSNE.unflatten(-1, (-1, self.group)).transpose(2, 3)
        y_BSMTW, scale_BSM1T, low_BSM1T = self._tokens(fields)
        s = (q_BSMNW @ y_BSMTW.mT).mul_(scale_BSM1T)
        if low_BSM1T is not None:
            s.addcmul_(q_BSMNW.sum(-1, keepdim=True), low_BSM1T)
        s = s.squeeze(2) if s.shape[2] == 1 else s.sum(2)
        return s.view(len(s), -1, q_BHND.shape[2], s.shape[-1])

    def mix(self, p_BHNT: Tensor, fields: Fields) -> Tensor:
        """Σ_t p_t x_t over every token of the blocks: [B, H, N, D]."""
        y_BSMTW, scale_BSM1T, low_BSM1T = self._tokens(fields)
        heads, size = self.codec.geometry.kv_heads, self.codec.geometry.head_size
        p_BSNT = p_BHNT.reshape(len(p_BHNT), heads * size // self.span, -1, p_BHNT.shape[-1])
        x_BSMNW = (p_BSNT[:, :, None] * scale_BSM1T) @ y_BSMTW
        if low_BSM1T is not None:
            x_BSMNW += p_BSNT[:, :, None] @ low_BSM1T.mT
        x_BSNE = x_BSMNW.transpose(2, 3).flatten(-2)
        x_BSNE = x_BSNE if self.turn is None else _turned(x_BSNE, self.turn)
        return self._own(x_BSNE, p_BHNT.shape[2])

    def _tokens(self, fields: Fields) -> tuple[Tensor, Tensor, Tensor | None]:
        """Looked-up values [B, S, M, T, W], and scales and low ends [B, S, M, 1, T], as views in float32."""
        codec = self.codec
        width, quantize = codec.geometry.width, codec.side.quantize
        y, scale, low = quantize.terms(fields, width, codec.geometry)
        y = y.float()
        y_BTSMW = y.flatten(1, 2).view(len(y), -1, width // self.span, self.span // self.group, self.group)
        parts = []
        for part in (scale, low):
            shaped = None if part is None else part.flatten(1, 2).view(*y_BTSMW.shape[:-1], 1).permute(0, 2, 3, 4, 1)
            parts.append(shaped)
        return y_BTSMW.permute(0, 2, 3, 1, 4), parts[0], parts[1]

    def _spread(self, q_BHND: Tensor) -> Tensor:
        """Queries in the place of their own head within a span: [B, S, heads · N, E]."""
        batch, heads, rows, size = q_BHND.shape
        inside = self.span // size
        if inside == 1:
            return q_BHND
        q = q_BHND.new_zeros(batch, heads // inside, inside, rows, inside, size)
        q.diagonal(dim1=2, dim2=4).copy_(q_BHND.unflatten(1, (-1, inside)).permute(0, 1, 3, 4, 2))
        return q.flatten(4).flatten(2, 3)

    def _own(self, x_BSNE: Tensor, rows: int) -> Tensor:
        """Of what a head's weights mixed in its span, its own channels: [B, H, N, D]."""
        size = self.codec.geometry.head_size
        inside = self.span // size
        if inside == 1:
            return x_BSNE
        x = x_BSNE.view(*x_BSNE.shape[:2], inside, rows, inside, size).diagonal(dim1=2, dim2=4)
        return x.permute(0, 1, 4, 2, 3).flatten(1, 2)


def fold(codec: Codec) -> Fold | None:
    """The Fold of a codec; None where blocks have to be decoded: predicted, before RoPE, per channel, mended."""
    side, geometry = codec.side, codec.geometry
    if side.axis != "token" or codec.predictor is not None or side.correct is not None or codec.turns_keys:
        return None
    if not hasattr(side.quantize, "terms"):
        return None
    group, turn = groups.size(side.quantize.group, geometry.width, geometry), _turn(codec)
    sizes = (group, geometry.head_size, 1 if turn is None else len(turn))
    span = max(sizes)
    if geometry.width % span or any(span % size for size in sizes):
        return None
    return Fold(codec, span, group, turn)


def _turn(codec: Codec) -> Tensor | None:
    """The rotation back, its rows in the order in which the quantizer gives its terms; None: nothing to do."""
    quantize, back = codec.side.quantize, codec.back
    if not hasattr(quantize, "terms_order"):
        return None if back is None else back.float()
    order = quantize.terms_order(codec.geometry.width, codec.geometry)
    if back is None and torch.equal(order, torch.arange(len(order))):
        return None
    back = torch.eye(len(order)) if back is None else back.float()
    size = max(len(order), len(back))
    rows = (torch.arange(0, size, len(order))[:, None] + order).flatten().to(back.device)
    return torch.block_diag(*[back] * (size // len(back)))[rows]


def _turned(x_BSNE: Tensor, matrix: Tensor) -> Tensor:
    return (x_BSNE.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)
