"""Attend with many queries at once: decode a slab to scratch, attend to it densely, and merge by the log-sum-exp.

Each slab is decoded once, whatever the number of queries, and scores of one slab and `SCORES` at most are held. The
decode kernel's tile has no room for these: see fused.py. What is multiplied is in the model's dtype, as tensor cores
take it: queries, keys, values, and the weights of these, at most 1; scores and all sums are in float32.

Y = B · H · N = G · T rows of queries per KV head.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_runtime.attention.fused import Fused
from kvq_runtime.attention.path import SCORES, Attended, Path, Query
from kvq_runtime.ops.dense import OnlineSoftmax, capped
from kvq_runtime.store.decode import Decoder

_WIDE = "dtype" in torch.ops.aten.baddbmm.overloads()


def multiplied(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return a · b · scale in float32, a [Y, N, X] and b [Y, X, T] in any dtype.

    On a CPU, or with a torch that has no products of 16 bits with sums in float32, the operands are float32 too, which
    gives the same but for the order of the sums.
    """
    zero = a.new_zeros((), dtype=torch.float32).expand(1, 1, 1)
    if a.is_cuda and a.dtype != torch.float32 and _WIDE:
        return torch.baddbmm(zero, a, b, out_dtype=torch.float32, beta=0, alpha=scale)  # type: ignore[call-overload]
    return torch.baddbmm(zero, a.float(), b.float(), beta=0, alpha=scale)


class LongQuery(Path):
    """For the layers that the decode kernel reads."""

    def __init__(self, decoder: Decoder, fused: Fused):
        self.decoder, self.fused = decoder, fused

    def attend(self, query: Query) -> Attended | None:
        """As `Path.attend`, causal, of rows that are padded on the left, or not at all."""
        store, q_BHTD, _, scale, cap = query
        if not self.fused.takes(query) or self.fused.fits(q_BHTD):
            return None
        starts_B, decoder = self.fused.padding.starts_B, self.decoder
        (batch, _, count, size), heads = q_BHTD.shape, decoder.geometry.kv_heads
        q_YND = q_BHTD.reshape(batch * heads, -1, size)
        rows, device = q_YND.shape[1], q_BHTD.device
        sums = OnlineSoftmax(q_YND)
        latest_N = store.length - count + torch.arange(rows, device=device) % count
        first_B1 = starts_B[:, None] + store.front

        def add(pair: Sequence[Tensor] | Tensor, slots_BT: Tensor, seen_BT: Tensor | None) -> None:
            k_YTD, v_YTD = (x.unflatten(2, (heads, size)).transpose(1, 2).flatten(0, 1) for x in pair)
            step = max(1, SCORES // k_YTD[..., 0].numel())
            for start in range(0, rows, step):
                part = slice(start, start + step)
                s_YNT = capped(multiplied(q_YND[:, part], k_YTD.mT, scale=scale), cap)
                if seen_BT is not None:
                    hidden_BNT = ~seen_BT[:, None] | (slots_BT[:, None] > latest_N[part, None])
                    s_YNT.unflatten(0, (batch, heads)).masked_fill_(hidden_BNT[:, None], -torch.inf)
                sums.add(s_YNT, lambda w_YNT: multiplied(w_YNT.to(v_YTD.dtype), v_YTD), part)

        for run in store.runs:
            slots_1T = torch.arange(*store.tokens(run), device=device)[None]
            whole = self.fused.positions.real_BT is None and store.tokens(run)[0] >= store.front  # all queries see all
            seen_BT = None if whole else slots_1T >= first_B1
            add((decoder.run(store.layer, 0, run), decoder.run(store.layer, 1, run)), slots_1T, seen_BT)
        slots_1T = torch.arange(store.encoded, store.length, device=device)[None]
        add(store.window_2BTC, slots_1T, slots_1T >= starts_B[:, None])
        if store.front:
            slots_BT = starts_B[:, None] + torch.arange(store.front, device=device)
            add(store.sinks_2BSC, slots_BT, slots_BT < store.encoded)
        level = (sums.top_YN + sums.total_YN.log()) / math.log(2)
        return Attended(sums.attended_YND.view(q_BHTD.shape).to(q_BHTD.dtype), level.view(q_BHTD.shape[:3]))
