"""Score queries against blocks of latents, and mix their values, with the basis folded into query and output.

A codec of latents decodes token t to  x_t = D (σ ∘ y_t) + μ_t,  y = gain · point of the code, D the dual basis. So

  q · k_t       = q · R_t μ + (σ ∘ Dᵀ R_-τ q) · y_t       the query is turned and multiplied once a segment, or once
  Σ_t p_t v_t   = μ Σ_t p_t + D (σ ∘ Σ_t p_t y_t)         the sum is multiplied once

R_-τ q is the query turned back by the middle τ of a segment; of keys after RoPE, which have no segments, q itself.

Y = B · H rows of heads · N queries per head · Q = 1 of a basis over all heads, or H of one by head · r channels of one
of these · S segments of s tokens.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import BlockRun
from kvq_runtime.codec.latent_codes import QUARTERS, LatentCodes
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.stage import Scheme, Tensors

Angles = Callable[[int], tuple[Tensor | None, Tensor]]  # tokens of a segment, 0: none → `rope.by_segment`


class LatentReader:
    """Attention to one codec's blocks of latents without decoding them.

    turn   σ ∘ D by head, a column for each row that is read, float32 [H, D, j]
    """

    by_group = False  # how slabs lie

    def __init__(
        self,
        scheme: Scheme,
        geometry: Geometry,
        tensors: Tensors,
        back_RC: Tensor,
        mean: Tensor,
        block: int,
        segment: int,
    ):
        quantize: Any = scheme.quantize
        heads = geometry.kv_heads
        groups = heads if getattr(scheme.rotate, "group", "all") == "head" else 1
        self.geometry, self.segment = geometry, segment
        self.codes = LatentCodes(quantize, geometry, tensors, block, groups)
        folded_HDR = back_RC.float().mT.unflatten(0, (heads, -1)) * quantize.scale(tensors)
        if groups > 1:
            folded_HDR = torch.stack([part[:, head::heads] for head, part in enumerate(folded_HDR)])
        self.turn = folded_HDR[..., self.codes.channel_j] * self.codes.factor_j
        self._mean_HD = mean.unflatten(0, (heads, -1))

    def view_blocks(self, fields: Mapping[str, Tensor], first: int) -> BlockRun:
        """Return the blocks [B, n, ...] of a run, from token `first` on."""
        return BlockRun(fields, first, fields["codes"].shape[1] * self.codes.block - first)

    def scores(self, q_YND: Tensor, blocks: BlockRun, angles: Angles) -> Tensor:
        """Return q · k for every token of the blocks: [Y, N, T]."""
        batch, count = blocks.fields["codes"].shape[:2]
        heads, size = self.geometry.kv_heads, self.codes.block // QUARTERS
        middles, waves_BTW = angles(self.segment)
        q_BHND = q_YND.unflatten(0, (batch, heads))
        if middles is None:
            u_BSHNr = torch.bmm(q_YND, self.turn.repeat(batch, 1, 1)).unflatten(0, (batch, 1, heads))
            u_BSHNr = u_BSHNr.expand(-1, QUARTERS * count, -1, -1, -1)
            unit = size
        else:
            u_BSHNr, unit = self._turned(q_BHND, middles), gcd(self.segment, size)
            if unit < self.segment:
                u_BSHNr = u_BSHNr.repeat_interleave(self.segment // unit, 1)
        u_BxQmMr = u_BSHNr.unflatten(1, (-1, size // unit)).unflatten(3, (self.codes.groups, -1)).flatten(4, 5)
        u_XmMr = u_BxQmMr.transpose(2, 3).flatten(0, 2)
        s_XMs = None
        for part in self.codes.read(blocks.fields):
            part_XMs = _by_unit(u_XmMr[..., part.rows], part.y_Xjs)
            part_XMs = part_XMs if part.gain_X1s is None else part_XMs.mul_(part.gain_X1s)
            s_XMs = part_XMs if s_XMs is None else s_XMs.add_(part_XMs)
        assert s_XMs is not None
        s_BHNxs = s_XMs.view(batch, -1, heads, q_YND.shape[1], size).permute(0, 2, 3, 1, 4)
        return s_BHNxs.flatten(3).flatten(0, 1).add_(self._of_mean(q_BHND, waves_BTW))[..., blocks.first :]

    def mix(self, p_YNT: Tensor, blocks: BlockRun) -> Tensor:
        """Return Σ_t p_t v_t over every token of the blocks: [Y, N, D]."""
        batch, heads, queries = len(blocks.fields["codes"]), self.geometry.kv_heads, p_YNT.shape[1]
        size, padded_YNT = self.codes.block // QUARTERS, p_YNT
        if blocks.first:
            padded_YNT = torch.nn.functional.pad(p_YNT, (blocks.first, 0))
        p_BxHNs = padded_YNT.reshape(batch, heads, queries, -1, size).permute(0, 3, 1, 2, 4)
        p_XMs = p_BxHNs.reshape(-1, heads // self.codes.groups * queries, size)
        parts = list[Tensor]()
        for part in self.codes.read(blocks.fields):
            x_XMr = torch.bmm(p_XMs if part.gain_X1s is None else p_XMs * part.gain_X1s, part.y_Xjs.mT)
            parts.append(x_XMr.view(batch, -1, heads, queries, x_XMr.shape[2]).sum(1))
        x_HXr = torch.cat(parts, -1).transpose(0, 1).flatten(1, 2)
        out_HXD = torch.bmm(x_HXr, self.turn.mT)
        out_BHND = out_HXD.unflatten(1, (batch, -1)).transpose(0, 1)
        mixed = out_BHND + p_YNT.sum(-1).view(batch, heads, -1, 1) * self._mean_HD[:, None]
        return mixed.flatten(0, 1)

    def _turned(self, q_BHND: Tensor, waves_BSW: Tensor) -> Tensor:
        """Return (σ ∘ Dᵀ R_-τ q) for the middle τ of every segment, [B, S, H, N, r]: a product with cosines and sines.

        Cosines of a pair of channels are multiplied by both channels' parts of the product with D; sines by the parts
        of a query turned by a quarter.
        """
        half = waves_BSW.shape[2] // 2
        q_BKHN1, r_BKHN1 = (q_BHND[..., at : at + half].permute(0, 3, 1, 2)[..., None] for at in (0, half))
        d_KH1r, e_KH1r = (self.turn[:, at : at + half].transpose(0, 1)[:, :, None] for at in (0, half))
        parts_BWHNr = torch.cat(
            [
                (q_BKHN1 * d_KH1r).addcmul_(r_BKHN1, e_KH1r),
                (r_BKHN1 * d_KH1r).addcmul_(q_BKHN1, e_KH1r, value=-1),
            ],
            1,
        )
        u_BSHNr = (waves_BSW @ parts_BWHNr.flatten(2)).unflatten(2, parts_BWHNr.shape[2:])
        if 2 * half < q_BHND.shape[-1]:
            u_BSHNr += (q_BHND[..., 2 * half :] @ self.turn[:, 2 * half :])[:, None]
        return u_BSHNr

    def _of_mean(self, q_BHND: Tensor, waves_BTW: Tensor) -> Tensor:
        """Return q · R_t μ, [Y, N, T]: a product with cosines and sines."""
        half, mean_HD = waves_BTW.shape[2] // 2, self._mean_HD[:, None]
        (q, r), (m, n) = ((x[..., :half], x[..., half : 2 * half]) for x in (q_BHND, mean_HD))
        sums_BMW = torch.cat([q * m + r * n, r * m - q * n], -1).flatten(1, 2)
        s_BMT = sums_BMW @ waves_BTW.mT
        if 2 * half < q_BHND.shape[-1]:
            s_BMT += (q_BHND[..., 2 * half :] * mean_HD[..., 2 * half :]).sum(-1).flatten(1)[..., None]
        return s_BMT.unflatten(1, q_BHND.shape[1:3]).flatten(0, 1)


def _by_unit(u_XmMr: Tensor, y_Xrs: Tensor) -> Tensor:
    """Multiply each of m units of a quarter's tokens by rows of its own: [X, M, s]."""
    units = u_XmMr.shape[1]
    if units == 1:
        return torch.bmm(u_XmMr[:, 0], y_Xrs)
    y_Zrs = y_Xrs.unflatten(2, (units, -1)).transpose(1, 2).flatten(0, 1)
    return torch.bmm(u_XmMr.flatten(0, 1), y_Zrs).unflatten(0, (-1, units)).transpose(1, 2).flatten(2)
