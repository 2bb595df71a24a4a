"""Attend to pages, requests of like length together, run by run of pages: torch, for any device.

What the decode kernel reads, it answers first (`fused.py`); the rest is for here.

Requests with equally many queries, one each when decoding, go together in a group, as long as its tokens are at most
`TOKENS`; a longer one goes alone. Pages are read in runs of at most `TOKENS` tokens of the whole group, and runs are
merged as in an online softmax, by their largest score: no longer history is ever decoded whole.

Where pages are encoded whole (`tails.py`) a query reads the pages before its own, and its own exact.

R requests of a group · Y = R · H · M = G · queries of a request, G query heads per KV head.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kvq_runtime.vllm import fused
from kvq_runtime.vllm.batch import Batch
from kvq_runtime.vllm.block_layer import BlockLayer
from kvq_runtime.vllm.layer import PagedLayer, Run
from kvq_runtime.vllm.own_page import OwnPages
from kvq_runtime.vllm.tails import Step

TOKENS = 1 << 13  # decoded at once, of one layer
SCORES = 1 << 24  # held at once


class _Sums:
    """Sums of rows of queries over the tokens so far: the largest score, Σ e^(s - top), Σ e^(s - top) v."""

    def __init__(self, q_YMD: Tensor):
        self.top_YM = q_YMD.new_full(q_YMD.shape[:2], -torch.inf)
        self.total_YM = torch.zeros_like(self.top_YM)
        self.sums_YMD = torch.zeros_like(q_YMD)

    def add(self, s_YMT: Tensor, mix: Callable[[Tensor], Tensor]) -> None:
        """Add tokens with these scores, -inf for one that a query does not see."""
        top_YM = torch.maximum(self.top_YM, s_YMT.amax(-1))
        base_YM = top_YM.where(top_YM.isfinite(), 0.0)
        fade_YM, p_YMT = (self.top_YM - base_YM).exp(), (s_YMT - base_YM[..., None]).exp_()
        self.total_YM = self.total_YM * fade_YM + p_YMT.sum(-1)
        self.sums_YMD = self.sums_YMD * fade_YM[..., None] + mix(p_YMT)
        self.top_YM = top_YM


def attend(layer: PagedLayer, batch: Batch, q_THD: Tensor, out_THD: Tensor, scale: float) -> None:
    """Write the attention of queries [T, query heads, D] into `out`, of the same shape: causal, over all tokens."""
    left = range(len(batch.counts))
    if isinstance(layer, BlockLayer):
        left = fused.attend(layer, batch, q_THD, out_THD, scale)
    for group in _groups(batch, left, layer.page.tokens):
        _attend(layer, batch, group, q_THD, out_THD, scale)


def _groups(batch: Batch, requests: Iterable[int], page: int) -> Iterator[list[int]]:
    """Requests that go together: of equal queries, next to each other in length, within `TOKENS` if more than one."""
    order = sorted((i for i in requests if batch.counts[i]), key=lambda i: (batch.counts[i], batch.lengths[i]))
    group: list[int] = []
    for index in order:
        slots = (len(group) + 1) * -(-batch.lengths[index] // page) * page
        if group and (batch.counts[group[0]] != batch.counts[index] or slots > TOKENS):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _attend(layer: PagedLayer, batch: Batch, group: list[int], q_THD: Tensor, out_THD: Tensor, scale: float) -> None:
    device, heads, size = q_THD.device, layer.geometry.kv_heads, q_THD.shape[-1]
    rows, count, page = len(group), batch.counts[group[0]], layer.page.tokens
    shared = q_THD.shape[1] // heads
    starts_R = torch.tensor([batch.starts[i] for i in group], device=device)
    lengths_R = torch.tensor([batch.lengths[i] for i in group], device=device)
    taken_RQ = starts_R[:, None] + torch.arange(count, device=device)
    q_RQHGD = q_THD[taken_RQ].unflatten(2, (heads, shared))
    q_YMD = q_RQHGD.permute(0, 2, 3, 1, 4).reshape(rows * heads, shared * count, size).float() * scale
    latest_RQ = (lengths_R - count)[:, None] + torch.arange(count, device=device)
    table_RP, sums = batch.table[group].long(), _Sums(q_YMD)
    written = [batch.lengths[i] if batch.tails is None else (batch.lengths[i] - 1) // page * page for i in group]
    seen_RQ = latest_RQ + 1 if batch.tails is None else latest_RQ // page * page  # tokens that are read from pages
    exact_R = _add_first(layer, batch, group, sums, q_YMD, seen_RQ)
    if batch.tails is not None:
        _add_own(layer, batch.tails, group, sums, q_YMD, latest_RQ)
    pages_R = torch.tensor([-(-tokens // page) for tokens in written], device=device)
    pages = -(-max(written) // page)
    step = max(1, min(TOKENS // (rows * page), SCORES // (q_YMD.shape[0] * q_YMD.shape[1] * page)))
    for start in range(0, pages, step):
        stop = min(start + step, pages)
        held_RP = pages_R[:, None] > torch.arange(start, stop, device=device)
        run = Run(table_RP[:, start:stop].where(held_RP, 0), start * page)
        s_YMT = layer.scores(q_YMD, run)
        slots_T = torch.arange(start * page, stop * page, device=device)
        hidden_RQT = slots_T >= seen_RQ[..., None]
        if exact_R is not None:
            hidden_RQT |= slots_T < exact_R[:, None, None]
        _hide(s_YMT, hidden_RQT, heads, shared)
        sums.add(s_YMT, lambda p_YMT, run=run: layer.mix(p_YMT, run))
    o_YMD = sums.sums_YMD / sums.total_YM[..., None]
    o_RQHD = o_YMD.view(rows, heads, shared, count, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
    out_THD[taken_RQ] = o_RQHD.to(out_THD.dtype)


def _add_first(
    layer: PagedLayer, batch: Batch, group: list[int], sums: _Sums, q_YMD: Tensor, seen_RQ: Tensor
) -> Tensor | None:
    """Add the exact first tokens, in place of what pages have of them; how many each request has, [R], or None."""
    if batch.entries is None or layer.exact_E2SC is None:
        return None
    entries_R = batch.entries[group]
    exact_R = torch.where(entries_R >= 0, layer.sinks, 0)
    entries_R = entries_R.clamp(min=0)
    s_YMS = torch.bmm(q_YMD, layer.exact("key", entries_R).mT)
    slots_S = torch.arange(layer.sinks, device=q_YMD.device)
    hidden_RQS = (slots_S >= seen_RQ[..., None]) | (slots_S >= exact_R[:, None, None])
    _hide(s_YMS, hidden_RQS, layer.geometry.kv_heads, s_YMS.shape[1] // seen_RQ.shape[1])
    sums.add(s_YMS, lambda p_YMS: torch.bmm(p_YMS, layer.exact("value", entries_R)))
    return exact_R


def _add_own(layer: PagedLayer, tails: Step, group: list[int], sums: _Sums, q_YMD: Tensor, latest_RQ: Tensor) -> None:
    """Add the tokens of each query's own page, up to the query's."""
    assert isinstance(layer, BlockLayer), "tails of a layer whose tokens are encoded one by one"
    own = OwnPages(layer, tails, group, latest_RQ.shape[1])
    s_YMN = own.scores(q_YMD)
    places_N = torch.arange(layer.page.tokens, device=q_YMD.device)
    hidden_RQN = places_N > (latest_RQ % layer.page.tokens)[..., None]
    _hide(s_YMN, hidden_RQN, layer.geometry.kv_heads, s_YMN.shape[1] // latest_RQ.shape[1])
    sums.add(s_YMN, own.mix)


def _hide(s_YMT: Tensor, hidden_RQT: Tensor, heads: int, shared: int) -> None:
    """Set scores to -inf, in place."""
    rows, count, _ = hidden_RQT.shape
    s_RHGQT = s_YMT.unflatten(1, (shared, count)).unflatten(0, (rows, heads))
    s_RHGQT.masked_fill_(hidden_RQT[:, None, None], -torch.inf)
