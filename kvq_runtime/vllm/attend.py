"""Attend to pages: with the decode kernel where it can, else by torch on any device.

The kernel takes requests with equally many queries in one launch, whatever their lengths, if the queries of each are
few and stand in one page whose exact tokens are in the pool of tails, which is what the window is to a cache. What a
step needs there is made once for all layers and copied to the device once, which nothing waits for.

By torch, requests with equally many queries, one each when decoding, go together in a group, as long as its tokens are
at most `TOKENS`; a longer one goes alone. Pages are read in runs of at most `TOKENS` tokens of the whole group, and
runs are merged as in an online softmax, by their largest score, so that no longer history is ever decoded whole.

A query reads the pages before its own encoded, and its own exact (`exact.py`).

R requests of a group · Y = R · H · M = G · queries of a request, G query heads per KV head · N tokens of a page.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvq_runtime.ops.dense import PLAIN, OnlineSoftmax, Softmax, capped, kept
from kvq_runtime.store.storage import sent
from kvq_runtime.vllm.exact import ExactStep
from kvq_runtime.vllm.layer import PagedLayer, Run

TOKENS = 1 << 13  # decoded at once, of one layer
SCORES = 1 << 24  # held at once


@dataclass
class Batch:
    """The requests of a step.

    starts     row of the first query of each, in the step's tokens
    counts     queries of each
    lengths    tokens of each in the cache, its queries among them, the newest
    table      physical page of each of its pages, int [requests, pages]; what lies beyond a length is anything
    exact      its exact tokens; None: a dry run
    groups     by number of queries, requests for the kernel, for all layers
    plans      by requests, what torch reads of them, for all layers
    """

    starts: Sequence[int]
    counts: Sequence[int]
    lengths: Sequence[int]
    table: Tensor
    exact: ExactStep | None = None
    groups: dict[int, "Group"] = field(default_factory=dict, compare=False)
    plans: dict[tuple[int, ...], list["Plan"]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Group:
    """Requests with equally many queries, for the kernel.

    rows       of their queries in the step's tokens
    table      int [B, pages]
    lengths    int32 [B, 4], see `PageReader.attend`
    """

    rows: Tensor
    table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Plan:
    """Requests with equally many queries, for torch: what all layers read of them.

    requests      their places in the batch
    taken_RQ      rows of their queries in the step's tokens
    firsts_R      entries of their exact first tokens; None: none has any
    unseen_RQS    first tokens that queries do not see, or that are not exact
    tails_R       entries of the pages that their queries stand in; None: not all stand in one page of the pool
    unseen_RQN    tokens of a query's own page that come after it
    runs          of full pages
    """

    requests: list[int]
    taken_RQ: Tensor
    firsts_R: Tensor | None
    unseen_RQS: Tensor
    tails_R: Tensor | None
    unseen_RQN: Tensor
    runs: list[Run]


class _Sums(OnlineSoftmax):
    """The sums of a group's scaled queries q, [Y, M, D]."""

    def __init__(self, q_YMD: Tensor, rows: int, heads: int, count: int, cap: float | None):
        super().__init__(q_YMD)
        self.q_YMD, self._by_query, self._cap = q_YMD, (rows, heads, -1, count), cap

    def by_query(self, x_YMX: Tensor) -> Tensor:
        """Return a view [R, H, G, queries, X]."""
        return x_YMX.view(*self._by_query, x_YMX.shape[-1])

    def add_seen(self, s_YMT: Tensor, unseen_RQT: Tensor | None, mix: Callable[[Tensor], Tensor]) -> None:
        """Add tokens, some of them unseen by queries."""
        s_YMT = capped(s_YMT, self._cap)
        if unseen_RQT is not None:
            self.by_query(s_YMT).masked_fill_(unseen_RQT[:, None, None], -torch.inf)
        self.add(s_YMT, mix)


def attend(
    layer: PagedLayer, batch: Batch, q_THD: Tensor, out_THD: Tensor, scale: float, softmax: Softmax = PLAIN
) -> None:
    """Write the attention of queries [T, query heads, D] into `out`, of the same shape: causal, over all tokens."""
    left = tuple(attend_packed(layer, batch, q_THD, out_THD, scale, softmax))
    if left not in batch.plans:
        rows = q_THD.shape[1]
        batch.plans[left] = [_plan(layer, batch, group, rows, q_THD.device) for group in _groups(batch, left)]
    for plan in batch.plans[left]:
        _attend(layer, batch, plan, q_THD, out_THD, scale, softmax)


def _groups(batch: Batch, requests: Iterable[int]) -> Iterator[list[int]]:
    """Group requests with equally many queries and similar lengths: of a short one pages are read in vain."""
    order = sorted((i for i in requests if batch.counts[i]), key=lambda i: (batch.counts[i], batch.lengths[i]))
    group: list[int] = []
    for index in order:
        longest = max(TOKENS // 8, 5 * batch.lengths[group[0]] // 4) if group else 0
        if group and (batch.counts[group[0]] != batch.counts[index] or batch.lengths[index] > longest):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _plan(layer: PagedLayer, batch: Batch, group: list[int], rows: int, device: torch.device) -> Plan:
    """Plan what a group reads; `rows` of queries have scores with a token each."""
    assert batch.exact is not None, "a step without exact tokens"
    page, sinks, count, exact = layer.page.tokens, layer.sinks, batch.counts[group[0]], batch.exact
    edges_R2 = torch.tensor([(batch.starts[i], batch.lengths[i] - count) for i in group], device=device)
    taken_RQ, latest_RQ = (edges_R2[..., None] + torch.arange(count, device=device)).unbind(1)
    encoded_RQ = latest_RQ // page * page  # tokens that are read from pages
    firsts_R = torch.tensor([exact.firsts[i] for i in group], device=device)
    exact_R11 = torch.where(firsts_R >= 0, sinks, 0)[:, None, None]
    slots_S = torch.arange(sinks, device=device)
    unseen_RQS = (slots_S >= encoded_RQ[..., None]) | (slots_S >= exact_R11)
    unseen_RQN = torch.arange(page, device=device) > (latest_RQ % page)[..., None]
    alone = all(len(exact.pieces[i]) == 1 and exact.pieces[i][0].tail.entry >= 0 for i in group)
    tails_R = torch.tensor([exact.pieces[i][0].tail.entry for i in group], device=device) if alone else None
    pages, table_RP, runs = (max(batch.lengths[i] for i in group) - 1) // page, batch.table[group].long(), list[Run]()
    step = max(1, min(TOKENS // (len(group) * page), SCORES // (len(group) * count * rows * page)))
    seen_by_all = min((batch.lengths[i] - count) // page for i in group)
    for start in range(0, pages, step):
        stop = min(start + step, pages)
        slots_T = torch.arange(start * page, stop * page, device=device)
        held_RP = encoded_RQ[:, -1:] > slots_T[::page]
        columns_RP, unseen_RQT = table_RP[:, start:stop].where(held_RP, table_RP[:, :1]), None
        if start * page < sinks or stop > seen_by_all:
            unseen_RQT = (slots_T >= encoded_RQ[..., None]) | (slots_T < exact_R11)
        runs.append(Run(columns_RP, start * page, unseen_RQT))
    some = sinks > 0 and any(exact.firsts[i] >= 0 for i in group)
    return Plan(
        group, taken_RQ, firsts_R.clamp(min=0) if some else None, unseen_RQS, tails_R, unseen_RQN, runs
    )  # fmt: skip


def _attend(
    layer: PagedLayer, batch: Batch, plan: Plan, q_THD: Tensor, out_THD: Tensor, scale: float, softmax: Softmax
) -> None:
    heads, (rows, count) = layer.geometry.kv_heads, plan.taken_RQ.shape
    q_RHGQD = q_THD[plan.taken_RQ].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    sums = _Sums((q_RHGQD.flatten(0, 1).flatten(1, 2).float() * scale), rows, heads, count, softmax.cap)
    if plan.firsts_R is not None and layer.exact_E2SC is not None:  # in place of their codes
        _add_exact(layer, sums, layer.exact_E2SC, plan.firsts_R, plan.unseen_RQS)
    if plan.tails_R is not None and layer.tails_E2NC is not None:
        _add_exact(layer, sums, layer.tails_E2NC, plan.tails_R, plan.unseen_RQN)
    else:
        _add_own(layer, batch, plan, sums)
    for run in plan.runs:
        sums.add_seen(layer.scores(sums.q_YMD, run), run.unseen_RQT, partial(layer.mix, run=run))
    o_RHGQD = sums.by_query(sums.attended_YND)
    if softmax.logit_H is not None:
        lse_RHQ = sums.by_query((sums.top_YN + sums.total_YN.log())[..., None])[..., 0].flatten(1, 2)
        o_RHGQD = o_RHGQD * kept(lse_RHQ, softmax.logit_H).view(*o_RHGQD.shape[:4], 1)
    out_THD[plan.taken_RQ] = o_RHGQD.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out_THD.dtype)


def _add_exact(layer: PagedLayer, sums: _Sums, pool_E2NC: Tensor, entries_R: Tensor, unseen_RQN: Tensor) -> None:
    """Add exact tokens of a pool, one entry a request."""
    k_YND, v_YND = (layer.by_head(x_RNC) for x_RNC in pool_E2NC[entries_R].unbind(1))
    sums.add_seen(torch.bmm(sums.q_YMD, k_YND.mT), unseen_RQN, lambda p_YMN: torch.bmm(p_YMN, v_YND))


def _add_own(layer: PagedLayer, batch: Batch, plan: Plan, sums: _Sums) -> None:
    """Add the tokens of each query's own page, which are read exact, up to the query's."""
    assert batch.exact is not None, "a step without exact tokens"
    heads, tokens = layer.geometry.kv_heads, layer.page.tokens
    own = list[tuple[int, slice, list[Tensor]]]()  # row, its queries, and keys and values of their page [H, N, D]
    for row, request in enumerate(plan.requests):
        for piece in batch.exact.pieces[request]:
            pair = [x_NC.float().unflatten(-1, (heads, -1)).transpose(0, 1) for x_NC in layer.own_page(piece)]
            own.append((row, slice(piece.start, piece.stop), pair))

    def product(x_YMX: Tensor, index: int) -> Tensor:
        """Multiply queries by the keys, or scores by the values, of their own page."""
        width = layer.geometry.head_size if index else tokens
        out_YMX = x_YMX.new_empty(*x_YMX.shape[:2], width)
        for row, queries, pair in own:
            x_HGQX, matrix = sums.by_query(x_YMX)[row, :, :, queries], pair[1] if index else pair[0].mT
            out_HMX = torch.bmm(x_HGQX.flatten(1, 2), matrix)
            sums.by_query(out_YMX)[row, :, :, queries] = out_HMX.view(*x_HGQX.shape[:3], width)
        return out_YMX

    sums.add_seen(product(sums.q_YMD, 0), plan.unseen_RQN, partial(product, index=1))


def attend_packed(
    layer: PagedLayer, batch: Batch, q_THD: Tensor, out_THD: Tensor, scale: float, softmax: Softmax = PLAIN
) -> list[int]:
    """Answer requests by the kernel into `out`; return the requests that are left."""
    reader, exact = layer.reader, batch.exact
    left = [i for i, count in enumerate(batch.counts) if count]
    if reader is None or exact is None:
        return left
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for i in left:
        if len(exact.pieces[i]) == 1 and exact.pieces[i][0].tail.entry >= 0:
            alike[batch.counts[i]].append(i)
    for count, requests in alike.items():
        if not reader.takes(q_THD, len(requests), count):
            continue
        if count not in batch.groups:
            batch.groups[count] = _group(batch, exact, requests, layer.page.tokens, q_THD.device)
        group = batch.groups[count]
        q_BHTD = q_THD[group.rows].unflatten(0, (-1, count)).transpose(1, 2)
        windows, sinks = layer.tails, layer.first_tokens
        o_BHTD = reader.attend(q_BHTD, group.table, group.lengths, windows, sinks, scale, softmax)
        out_THD[group.rows] = o_BHTD.transpose(1, 2).flatten(0, 1)
        left = [i for i in left if i not in requests]
    return left


def _group(batch: Batch, exact: ExactStep, requests: list[int], page: int, device: torch.device) -> Group:
    lengths_B4 = torch.tensor([
        [(batch.lengths[i] - 1) // page, exact.pieces[i][0].tail.entry, (batch.lengths[i] - 1) % page + 1,
         exact.firsts[i]] for i in requests
    ], dtype=torch.int32)  # fmt: skip
    rows = [batch.starts[i] + n for i in requests for n in range(batch.counts[i])]
    chosen, rows = (sent(torch.tensor(x), device) for x in (requests, rows))
    return Group(rows, batch.table[chosen], sent(lengths_B4, device))
