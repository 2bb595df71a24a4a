"""Attend with many queries at once: decode a slab to scratch, attend to it densely, and merge by the log-sum-exp.

Each slab is decoded once, whatever the number of queries, and scores of one slab and `SCORES` at most are held. The
decode kernel's tile has no room for these: see fused.py.

Y = B · H · N = G · T rows of queries per KV head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.attention.fused import Fused, refusal
from kvq_runtime.attention.path import Attended, Path
from kvq_runtime.attention.reference import SCORES, by_head
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore


@dataclass
class _Sums:
    """Of N rows of queries, over the tokens so far: the largest score, Σ e^(s - top), Σ e^(s - top) v."""

    top_YN: Tensor
    total_YN: Tensor
    sums_YND: Tensor

    def add(self, rows: slice, s_YNT: Tensor, v_YTD: Tensor) -> None:
        """Add tokens, with scores -inf where a query does not see them, to some of the rows."""
        before_YN = self.top_YN[:, rows]
        top_YN = torch.maximum(before_YN, s_YNT.amax(-1))
        base_YN = top_YN.where(top_YN.isfinite(), 0.0)
        fade_YN, w_YNT = (before_YN - base_YN).exp(), (s_YNT - base_YN[..., None]).exp()
        self.total_YN[:, rows] = self.total_YN[:, rows] * fade_YN + w_YNT.sum(-1)
        self.sums_YND[:, rows] = torch.baddbmm(self.sums_YND[:, rows] * fade_YN[..., None], w_YNT, v_YTD)
        self.top_YN[:, rows] = top_YN


class LongQuery(Path):
    """For the layers that the decode kernel reads."""

    def __init__(self, decoder: Decoder, fused: Fused):
        self.decoder, self.fused = decoder, fused

    @staticmethod
    def refusal(recipe: Recipe, geometry: Geometry, layer: int = 0) -> str | None:
        return refusal(recipe, geometry, layer)

    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Attended | None:
        """As `Path.attend`, causal, of rows that are padded on the left, or not at all."""
        if not self.fused.takes(store, q_BHTD, mask) or self.fused.fits(layer, q_BHTD):
            return None
        starts_B, decoder = self.fused.padding.starts_B, self.decoder
        (batch, _, count, size), heads = q_BHTD.shape, decoder.geometry.kv_heads
        q_YND = (q_BHTD.float() * scale).reshape(batch * heads, -1, size)
        rows, device = q_YND.shape[1], q_BHTD.device
        sums = _Sums(q_YND.new_full((len(q_YND), rows), -torch.inf), q_YND.new_zeros(len(q_YND), rows), q_YND * 0)
        latest_N = store.length - count + torch.arange(rows, device=device) % count
        first_B1 = starts_B[:, None] + store.front

        def add(pair: Sequence[Tensor] | Tensor, slots_BT: Tensor, seen_BT: Tensor) -> None:
            k_YTD, v_YTD = (by_head(x_BTC, heads).flatten(0, 1) for x_BTC in pair)
            seen_YT, slots_YT = (x.expand(batch, -1).repeat_interleave(heads, 0) for x in (seen_BT, slots_BT))
            step = max(1, SCORES // k_YTD[..., 0].numel())
            for start in range(0, rows, step):
                part = slice(start, start + step)
                hidden = ~seen_YT[:, None] | (slots_YT[:, None] > latest_N[part, None])
                s_YNT = torch.bmm(q_YND[:, part], k_YTD.mT).masked_fill_(hidden, -torch.inf)
                sums.add(part, s_YNT, v_YTD)

        for run in store.runs():
            slots_1T = torch.arange(*store.tokens(run), device=device)[None]
            add((decoder.run(layer, 0, run), decoder.run(layer, 1, run)), slots_1T, slots_1T >= first_B1)
        slots_1T = torch.arange(store.encoded, store.length, device=device)[None]
        add(store.window_2BTC, slots_1T, slots_1T >= starts_B[:, None])
        if store.front:
            slots_BT = starts_B[:, None] + torch.arange(store.front, device=device)
            add(store.sinks_2BSC, slots_BT, slots_BT < store.encoded)
        out = sums.sums_YND / sums.total_YN.where(sums.total_YN > 0, 1.0)[..., None]
        level = (sums.top_YN + sums.total_YN.log()) / math.log(2)
        return Attended(out.view(q_BHTD.shape).to(q_BHTD.dtype), level.view(q_BHTD.shape[:3]))
