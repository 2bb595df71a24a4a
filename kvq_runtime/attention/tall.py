"""Attend with many queries at once: decode a slab to scratch, attend to it densely, and merge by the log-sum-exp.

Each slab is decoded once, whatever the number of queries, and scores of one slab and `SCORES` at most are held. The
decode kernel's tile has no room for these: see fused.py.

Y = B · H · N = G · T rows of queries per KV head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.attention.attend import SCORES
from kvq_runtime.history import History


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


def attend(history: History, layer: int, q_BHTD: Tensor, starts_B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As Fused.attend, causal, of rows that begin at `starts`; keys and values have the same window."""
    keys, values = history.layers[layer]
    (batch, _, count, size), heads = q_BHTD.shape, history.geometry.kv_heads
    q_YND = (q_BHTD.float() * scale).reshape(batch * heads, -1, size)
    rows, device = q_YND.shape[1], q_BHTD.device
    found = _Sums(q_YND.new_full((len(q_YND), rows), -torch.inf), q_YND.new_zeros(len(q_YND), rows), q_YND * 0)
    latest_N = keys.length - count + torch.arange(rows, device=device) % count
    first_B1 = starts_B[:, None] + keys.front

    def add(k_BTC: Tensor, v_BTC: Tensor, slots_BT: Tensor, seen_BT: Tensor) -> None:
        k_YTD, v_YTD = _heads(k_BTC, heads), _heads(v_BTC, heads)
        seen_YT, slots_YT = (x.expand(batch, -1).repeat_interleave(heads, 0) for x in (seen_BT, slots_BT))
        step = max(1, SCORES // k_YTD[..., 0].numel())
        for start in range(0, rows, step):
            part = slice(start, start + step)
            hidden = ~seen_YT[:, None] | (slots_YT[:, None] > latest_N[part, None])
            s_YNT = torch.bmm(q_YND[:, part], k_YTD.mT).masked_fill_(hidden, -torch.inf)
            found.add(part, s_YNT, v_YTD)

    for run in keys.runs():
        slots_1T = torch.arange(*keys.tokens(run), device=device)[None]
        add(history.run(layer, 0, run), history.run(layer, 1, run), slots_1T, slots_1T >= first_B1)
    slots_1T = torch.arange(keys.encoded, keys.length, device=device)[None]
    add(keys.window_BTC, values.window_BTC, slots_1T, slots_1T >= starts_B[:, None])
    if keys.front:
        slots_BT = starts_B[:, None] + torch.arange(keys.front, device=device)
        add(keys.sinks_BSC, values.sinks_BSC, slots_BT, slots_BT < keys.encoded)
    out = found.sums_YND / found.total_YN.where(found.total_YN > 0, 1.0)[..., None]
    level = (found.top_YN + found.total_YN.log()) / math.log(2)
    return out.view(q_BHTD.shape).to(q_BHTD.dtype), level.view(q_BHTD.shape[:3])


def _heads(x_BTC: Tensor, heads: int) -> Tensor:
    """[Y, T, D], float32."""
    return x_BTC.float().unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)
