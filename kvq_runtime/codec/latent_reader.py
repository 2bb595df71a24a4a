"""Score queries against blocks of latents, and mix their values, with the basis folded into query and output.

A codec of latents decodes token t to  x_t = D (σ ∘ y_t) + μ_t,  y = gain · point of the code, D the dual basis. So

  q · k_t       = q · R_t μ + (σ ∘ Dᵀ R_-τ q) · y_t       the query is turned and multiplied once a segment, or once
  Σ_t p_t v_t   = μ Σ_t p_t + D (σ ∘ Σ_t p_t y_t)         the sum is multiplied once

R_-τ q is the query turned back by the middle τ of a segment; of keys after RoPE, which have no segments, q itself.

Y = B · H rows of heads · N queries per head · Q = 1 of a basis over all heads, or H of one by head · r channels of one
of these · S segments of s tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Pair
from kvq_runtime.stages.stage import Scheme, Tensors

# tokens of a segment, 0: none → cos and sin of the middles of segments, [B or 1, S, K], or None, and of the tokens,
# [B or 1, T, K]
Angles = Callable[[int], tuple[Pair | None, Pair]]


@dataclass(frozen=True)
class LatentBlocks:
    """A run of blocks as a LatentReader reads it: fields [B, n, ...], without the first tokens of the first block."""

    fields: Mapping[str, Tensor]
    first: int
    tokens: int


class LatentReader:
    """Attention to one codec's blocks of latents without decoding them.

    turn   σ ∘ D by head, float32 [H, D, r]
    """

    by_group = False  # how slabs lie

    def __init__(
        self, scheme: Scheme, geometry: Geometry, tensors: Tensors, back_RC: Tensor, mean: Tensor, segment: int
    ):
        self.quantize: Any = scheme.quantize
        self.geometry, self.tensors, self.segment = geometry, tensors, segment
        heads = geometry.kv_heads
        self.groups = heads if getattr(scheme.rotate, "group", "all") == "head" else 1
        folded_HDR = back_RC.float().mT.unflatten(0, (heads, -1)) * self.quantize.scale(tensors)
        if self.groups > 1:
            folded_HDR = torch.stack([part[:, head::heads] for head, part in enumerate(folded_HDR)])
        self.turn = folded_HDR.contiguous()
        self._mean_HD = mean.unflatten(0, (heads, -1))

    def view_blocks(self, fields: Mapping[str, Tensor], first: int) -> LatentBlocks:
        """Return the blocks [B, n, ...] of a run, from token `first` on."""
        block = self.quantize.tokens(fields["codes"], self.geometry.width)
        return LatentBlocks(fields, first, fields["codes"].shape[1] * block - first)

    def scores(self, q_YND: Tensor, blocks: LatentBlocks, angles: Angles) -> Tensor:
        """Return q · k for every token of the blocks: [Y, N, T]."""
        y_BrQT = self._latents(blocks)
        batch, rows, _, tokens = y_BrQT.shape
        middles, tables = angles(self.segment)
        heads, count = self.geometry.kv_heads, q_YND.shape[1]
        q_BHND = q_YND.unflatten(0, (batch, heads))
        if middles is None:
            turned_BSHND = q_BHND[:, None]
        else:
            parts = middles[0].shape[1]
            flat_BSMD = q_BHND.reshape(batch, 1, heads * count, -1).expand(-1, parts, -1, -1)
            turned_BSHND = rope.rotate(flat_BSMD, middles[0], -middles[1]).unflatten(2, (heads, count))
        parts = turned_BSHND.shape[1]
        by_head_HXD = turned_BSHND.permute(2, 0, 1, 3, 4).reshape(heads, -1, q_YND.shape[2])
        u_HBSNr = torch.bmm(by_head_HXD, self.turn).view(heads, batch, parts, count, rows)
        u_XMr = u_HBSNr.permute(1, 2, 0, 3, 4).reshape(batch * parts * self.groups, -1, rows)
        y_BSQrs = y_BrQT.unflatten(3, (parts, -1)).permute(0, 3, 2, 1, 4)
        s_BSQMs = torch.bmm(u_XMr, y_BSQrs.reshape(-1, rows, tokens // parts)).view(batch, parts, heads, count, -1)
        s_YNT = s_BSQMs.permute(0, 2, 3, 1, 4).reshape(batch * heads, count, tokens)
        return s_YNT.add_(self._of_mean(q_BHND, tables))[..., blocks.first :]

    def mix(self, p_YNT: Tensor, blocks: LatentBlocks) -> Tensor:
        """Return Σ_t p_t v_t over every token of the blocks: [Y, N, D]."""
        y_BrQT = self._latents(blocks)[..., blocks.first :]
        batch, rows, groups, tokens = y_BrQT.shape
        heads = self.geometry.kv_heads
        p_XMT = p_YNT.reshape(batch * groups, -1, tokens)
        x_XMr = torch.bmm(p_XMT, y_BrQT.permute(0, 2, 3, 1).reshape(-1, tokens, rows))
        x_HXr = x_XMr.view(batch, heads, -1, rows).transpose(0, 1).reshape(heads, -1, rows)
        out_HXD = torch.bmm(x_HXr, self.turn.mT)
        out_BHND = out_HXD.view(heads, batch, -1, self.geometry.head_size).transpose(0, 1)
        mixed = out_BHND + p_YNT.sum(-1).view(batch, heads, -1, 1) * self._mean_HD[:, None]
        return mixed.flatten(0, 1)

    def _latents(self, blocks: LatentBlocks) -> Tensor:
        """Return latents over their deviations, gains included: float32 [B, r, Q, T]."""
        y_BRT = self.quantize.latents(blocks.fields, self.geometry.width, self.tensors)
        return y_BRT.unflatten(1, (-1, self.groups))

    def _of_mean(self, q_BHND: Tensor, tables: Pair) -> Tensor:
        """Return q · R_t μ, [Y, N, T]: a product with cosines, and one with sines."""
        half, mean_HD = tables[0].shape[-1], self._mean_HD[:, None]
        (q, r), (m, n) = ((x[..., :half], x[..., half : 2 * half]) for x in (q_BHND, mean_HD))
        waves_BTK = torch.cat([table.float() for table in tables], -1)
        sums_BMK = torch.cat([q * m + r * n, r * m - q * n], -1).flatten(1, 2)
        s_BMT = sums_BMK @ waves_BTK.mT
        rest_BMT = (q_BHND[..., 2 * half :] * mean_HD[..., 2 * half :]).sum(-1).flatten(1)[..., None]
        return (s_BMT + rest_BMT).unflatten(1, q_BHND.shape[1:3]).flatten(0, 1)
