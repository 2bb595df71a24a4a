"""Attend to pages: with the decode kernel where it can, else by torch on any device.

The kernel takes requests with equally many queries in one launch, whatever their lengths, if the queries of each stand
in one page, whose exact tokens are what the window is to a cache, and are few. What a step needs there is made once for
all layers and copied to the device once, which nothing waits for.

By torch, requests with equally many queries, one each when decoding, go together in a group, as long as its tokens are
at most `TOKENS`; a longer one goes alone. Pages are read in runs of at most `TOKENS` tokens of the whole group, and
runs are merged as in an online softmax, by their largest score, so that no longer history is ever decoded whole.

Where pages are encoded whole (`exact.py`) a query reads the pages before its own encoded, and its own exact.

R requests of a group · Y = R · H · M = G · queries of a request, G query heads per KV head · N tokens of a page.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvq_runtime.store.storage import sent
from kvq_runtime.vllm.exact import Copies, TailWork
from kvq_runtime.vllm.layer import BlockLayer, PageColumns, PagedLayer

TOKENS = 1 << 13  # decoded at once, of one layer
SCORES = 1 << 24  # held at once


@dataclass
class Batch:
    """The requests of a step.

    starts     row of the first query of each, in the step's tokens
    counts     queries of each
    lengths    tokens of each in the cache, its queries among them, the newest
    table      physical page of each of its pages, int [requests, pages]; what lies beyond a length is anything
    entries    where its first tokens are kept exact, -1: nowhere; None: nowhere for all
    tails      of pages that are encoded whole, what the step does with them; None: every token is encoded at once
    positions  of the step's tokens in their texts, int64 [T]
    arrived    which of these are first tokens, that are kept exact; None: first tokens are not kept
    groups     by number of queries, requests for the kernel, for all layers
    """

    starts: Sequence[int]
    counts: Sequence[int]
    lengths: Sequence[int]
    table: Tensor
    entries: Sequence[int] | None = None
    tails: TailWork | None = None
    positions_T: Tensor | None = None
    arrived: Copies | None = None
    groups: dict[int, "Group"] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Group:
    """Requests with equally many queries, for the kernel.

    rows       of their queries in the step's tokens
    table      int [B, pages]
    lengths    int32 [B, 4], see `PageReader.attend`
    owns       their own pages, where not all of these are in the pool of tails; None: they are
    """

    rows: Tensor
    table: Tensor
    lengths: Tensor
    owns: list[int] | None


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
        left = attend_packed(layer, batch, q_THD, out_THD, scale)
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
        columns = PageColumns(table_RP[:, start:stop].where(held_RP, table_RP[:, :1]), start * page)
        s_YMT = layer.scores(q_YMD, columns)
        slots_T = torch.arange(start * page, stop * page, device=device)
        hidden_RQT = slots_T >= seen_RQ[..., None]
        if exact_R is not None:
            hidden_RQT |= slots_T < exact_R[:, None, None]
        _hide(s_YMT, hidden_RQT, heads, shared)
        sums.add(s_YMT, lambda p_YMT, columns=columns: layer.mix(p_YMT, columns))
    o_YMD = sums.sums_YMD / sums.total_YM[..., None]
    o_RQHD = o_YMD.view(rows, heads, shared, count, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
    out_THD[taken_RQ] = o_RQHD.to(out_THD.dtype)


def _add_first(
    layer: PagedLayer, batch: Batch, group: list[int], sums: _Sums, q_YMD: Tensor, seen_RQ: Tensor
) -> Tensor | None:
    """Add the exact first tokens, in place of what pages have of them; how many each request has, [R], or None."""
    if batch.entries is None or layer.exact_E2SC is None:
        return None
    entries_R = torch.tensor([batch.entries[i] for i in group], device=q_YMD.device)
    exact_R = torch.where(entries_R >= 0, layer.sinks, 0)
    entries_R = entries_R.clamp(min=0)
    s_YMS = torch.bmm(q_YMD, layer.exact("key", entries_R).mT)
    slots_S = torch.arange(layer.sinks, device=q_YMD.device)
    hidden_RQS = (slots_S >= seen_RQ[..., None]) | (slots_S >= exact_R[:, None, None])
    _hide(s_YMS, hidden_RQS, layer.geometry.kv_heads, s_YMS.shape[1] // seen_RQ.shape[1])
    sums.add(s_YMS, lambda p_YMS: torch.bmm(p_YMS, layer.exact("value", entries_R)))
    return exact_R


def _add_own(
    layer: PagedLayer, tails: TailWork, group: list[int], sums: _Sums, q_YMD: Tensor, latest_RQ: Tensor
) -> None:
    """Add the tokens of each query's own page, which are read exact, up to the query's."""
    assert isinstance(layer, BlockLayer), "tails of a layer whose tokens are encoded one by one"
    heads, tokens, (rows, count) = layer.geometry.kv_heads, layer.page.tokens, latest_RQ.shape
    pieces: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, request in enumerate(group):
        for start, stop, own in tails.pieces[request]:
            pieces[start, stop].append((row, own))
    exact = list[
        tuple[list[int], int, int, list[Tensor]]
    ]()  # rows of requests, their queries, keys and values [·, N, D]
    for (start, stop), owned in pieces.items():
        chosen, owns = (list(x) for x in zip(*owned, strict=True))
        exact.append((chosen, start, stop, [layer.by_head(x_ONC) for x_ONC in layer.own_pages(owns)]))

    def product(role: int, x_YMX: Tensor, width: int) -> Tensor:
        """Rows of queries, times those of their page's tokens: [Y, M, width]."""
        out = x_YMX.new_empty(*x_YMX.shape[:2], width)
        out_RHGQX, x_RHGQX = (x.view(rows, heads, -1, count, x.shape[-1]) for x in (out, x_YMX.contiguous()))
        for chosen, start, stop, pair in exact:
            part = x_RHGQX[chosen, :, :, start:stop]
            mixed = torch.bmm(part.flatten(0, 1).flatten(1, 2), pair[role] if role else pair[role].mT)
            out_RHGQX[chosen, :, :, start:stop] = mixed.view(*part.shape[:4], -1)
        return out

    s_YMN = product(0, q_YMD, tokens)
    hidden_RQN = torch.arange(tokens, device=q_YMD.device) > (latest_RQ % tokens)[..., None]
    _hide(s_YMN, hidden_RQN, heads, s_YMN.shape[1] // count)
    sums.add(s_YMN, lambda p_YMN: product(1, p_YMN, layer.geometry.head_size))


def _hide(s_YMT: Tensor, hidden_RQT: Tensor, heads: int, shared: int) -> None:
    """Set scores to -inf, in place."""
    rows, count, _ = hidden_RQT.shape
    s_RHGQT = s_YMT.unflatten(1, (shared, count)).unflatten(0, (rows, heads))
    s_RHGQT.masked_fill_(hidden_RQT[:, None, None], -torch.inf)


def attend_packed(layer: BlockLayer, batch: Batch, q_THD: Tensor, out_THD: Tensor, scale: float) -> list[int]:
    """Write what the kernel answers of `attend` into `out`; return the requests that are left."""
    reader, tails = layer.reader, batch.tails
    left = [i for i, count in enumerate(batch.counts) if count]
    if reader is None or tails is None:
        return left
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for i in left:
        if len(tails.pieces[i]) == 1:
            alike[batch.counts[i]].append(i)
    for count, requests in alike.items():
        if not reader.takes(q_THD, len(requests), count):
            continue
        if count not in batch.groups:
            batch.groups[count] = _group(batch, tails, requests, layer.page.tokens, q_THD.device)
        group = batch.groups[count]
        q_BHTD = q_THD[group.rows].unflatten(0, (-1, count)).transpose(1, 2)
        keys, values = layer.tails if group.owns is None else layer.own_pages(group.owns)
        o_BHTD = reader.attend(q_BHTD, group.table, group.lengths, (keys, values), layer.first_tokens, scale)
        out_THD[group.rows] = o_BHTD.transpose(1, 2).flatten(0, 1)
        left = [i for i in left if i not in requests]
    return left


def _group(batch: Batch, tails: TailWork, requests: list[int], page: int, device: torch.device) -> Group:
    owns = [tails.pieces[i][0].own for i in requests]
    entries = [tails.entries[own] for own in owns]
    pooled = min(entries) >= 0
    windows = entries if pooled else range(len(requests))
    firsts = [batch.entries[i] if batch.entries else -1 for i in requests]
    lengths_B4 = torch.tensor([
        [(batch.lengths[i] - 1) // page, window, (batch.lengths[i] - 1) % page + 1, first]
        for i, window, first in zip(requests, windows, firsts, strict=True)
    ], dtype=torch.int32)  # fmt: skip
    rows = [batch.starts[i] + n for i in requests for n in range(batch.counts[i])]
    chosen, rows = (sent(torch.tensor(x), device) for x in (requests, rows))
    return Group(rows, batch.table[chosen], sent(lengths_B4, device), None if pooled else owns)
