"""Attention to whole keys and values, with what some models do to scores before or inside the softmax.

    out_t = Σ_s p_ts v_s        p = softmax over s and the head's own logit        s_ts = c tanh(q_t · k_s scale / c)

c is a cap on scores (Gemma 2); the logit, which no token stands for, takes its share of the weight (gpt-oss). Without
either this is `scaled_dot_product_attention`. Scores, softmax, keys and values are float32, and at most SCORES scores
are held at once.

S tokens that are read · H query heads · K KV heads, each of H / K query heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SCORES = 1 << 24  # held at once


@dataclass(frozen=True)
class Softmax:
    """The terms of a layer's softmax beside scores.

    cap      the bound of a score; None: none
    logit_H  the logit of no token, one a query head; None: none
    """

    cap: float | None = None
    logit_H: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.cap is None and self.logit_H is None

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Softmax":
        """That of the arguments of an attention function of transformers."""
        return Softmax(given.get("softcap"), given.get("s_aux"))


PLAIN = Softmax()


class OnlineSoftmax:
    """Sums of N rows of queries over the tokens so far: the largest score, Σ e^(s - top), Σ e^(s - top) v, float32."""

    def __init__(self, q_YND: Tensor):
        self.sums_YND = torch.zeros_like(q_YND, dtype=torch.float32)
        self.top_YN = self.sums_YND.new_full(q_YND.shape[:2], -torch.inf)
        self.total_YN = torch.zeros_like(self.top_YN)

    def add(self, s_YNT: Tensor, mix: Callable[[Tensor], Tensor], rows: slice = slice(None)) -> None:
        """Add tokens to some of the rows.

        s     scores, -inf where a query does not see a token; they are changed
        mix   weights [Y, rows, T], float32 and at most 1, → Σ w v
        """
        before_YN = self.top_YN[:, rows]
        top_YN = torch.maximum(before_YN, s_YNT.amax(-1))
        base_YN = top_YN.where(top_YN.isfinite(), 0.0)
        fade_YN, w_YNT = (before_YN - base_YN).exp(), s_YNT.sub_(base_YN[..., None]).exp_()
        self.total_YN[:, rows] = self.total_YN[:, rows] * fade_YN + w_YNT.sum(-1)
        self.sums_YND[:, rows] = self.sums_YND[:, rows] * fade_YN[..., None] + mix(w_YNT)
        self.top_YN[:, rows] = top_YN

    @property
    def attended_YND(self) -> Tensor:
        """The attention of the rows; zeros where a query has seen no token."""
        return self.sums_YND / self.total_YN.where(self.total_YN > 0, 1.0)[..., None]


def attention(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, scale: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Attend by the newest T tokens' queries: [B, H, T, D of the values], in the dtype of the queries.

    mask    bool [B or 1, 1 or H, T, S], True where a query sees a token, or what is added to scores; None: causal
    """
    count, read = q_BHTD.shape[2], k_BHSD.shape[2]
    if softmax.plain:
        whole = mask is None and count == read  # which fused kernels take without a mask
        mask = _seen(count, read, q_BHTD.device, slice(0, count)) if mask is None and not whole else mask
        return scaled_dot_product_attention(
            q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
        )
    with torch.autocast(q_BHTD.device.type, enabled=False):
        k_BKSD, v_BKSD = k_BHSD.float(), v_BHSD.float()
        step = max(1, SCORES // max(1, len(q_BHTD) * q_BHTD.shape[1] * read))
        out = []
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            seen = _seen(count, read, q_BHTD.device, part) if mask is None else mask[:, :, part]
            out.append(_part(q_BHTD[:, :, part].float(), k_BKSD, v_BKSD, seen, scale, softmax).to(q_BHTD.dtype))
    return torch.cat(out, 2) if out else torch.empty_like(q_BHTD)


def _part(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, seen: Tensor, scale: float, softmax: Softmax) -> Tensor:
    batch, heads, count, _ = q_BHTD.shape
    grouped = q_BHTD.reshape(batch, k_BKSD.shape[1], -1, q_BHTD.shape[-1])  # query heads of a KV head as more queries
    s = (grouped @ k_BKSD.mT * scale).view(batch, heads, count, -1)
    s = capped(s, softmax.cap)
    s = s.masked_fill(~seen, torch.finfo(torch.float32).min) if seen.dtype == torch.bool else s + seen
    level_BHT1 = s.logsumexp(-1, keepdim=True)
    p = (s - level_BHT1).exp()
    if softmax.logit_H is not None:
        p = p * kept(level_BHT1[..., 0], softmax.logit_H)[..., None]
    mixed = p.reshape(batch, k_BKSD.shape[1], -1, p.shape[-1]) @ v_BKSD
    return mixed.view(batch, heads, count, -1)


def capped(s: Tensor, cap: float | None) -> Tensor:
    """Return scores bounded by ±cap, cap · tanh(s / cap); as they are where there is none."""
    return s if cap is None else torch.tanh(s / cap) * cap


def kept(lse_BHT: Tensor, logit_H: Tensor) -> Tensor:
    """Return the share of weight that tokens keep beside the logit of no token, from log Σ e^s of theirs, [B, H, T]."""
    return torch.sigmoid(lse_BHT - logit_H.float()[:, None])


def _seen(count: int, read: int, device: torch.device, part: slice) -> Tensor:
    """Mask some of the newest `count` queries: each sees itself and all before, bool [1, 1, queries, S]."""
    places = torch.arange(read, device=device)
    return (places <= places[read - count :][part, None])[None, None]
