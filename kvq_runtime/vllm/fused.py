"""Attend to pages with the decode kernel: requests with equally many queries in one launch, whatever their lengths.

A request is the kernel's if its queries stand in one page, whose tokens, exact, are what the window is to a cache, and
are few. What is made for a step, all layers use: one copy to the device, which nothing waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.store.device import sent
from kvq_runtime.vllm.batch import Batch
from kvq_runtime.vllm.block_layer import BlockLayer


@dataclass(frozen=True)
class _Group:
    """Requests with equally many queries.

    requests   which of the step's they are
    rows       of their queries in the step's tokens
    table      int [B, pages]
    lengths    int32 [B, 4], see `PageReader.attend`
    owns       their own pages, where not all of these are in the pool of tails; None: they are
    """

    requests: list[int]
    rows: slice | Tensor
    table: Tensor
    lengths: Tensor
    owns: list[int] | None


def attend(layer: BlockLayer, batch: Batch, q_THD: Tensor, out_THD: Tensor, scale: float) -> list[int]:
    """Write what the kernel answers of `attend.attend` into `out`; the requests that are left."""
    reader, tails = layer.reader, batch.tails
    left = [i for i, count in enumerate(batch.counts) if count]
    if reader is None or tails is None:
        return left
    alike: dict[int, list[int]] = {}
    for i in left:
        if len(tails.pieces[i]) == 1:
            alike.setdefault(batch.counts[i], []).append(i)
    answered = set[int]()
    for count, requests in alike.items():
        if not reader.takes(q_THD, len(requests), count):
            continue
        group = batch.made.get(("fused", count))
        if group is None:
            group = batch.made["fused", count] = _group(layer, batch, requests, count, q_THD.device)
        q_BHTD = q_THD[group.rows].unflatten(0, (-1, count)).transpose(1, 2)
        windows = layer.windows if group.owns is None else layer.own_pages(group.owns)
        o_BHTD = reader.attend(q_BHTD, group.table, group.lengths, windows, layer.sinks_pool(q_THD), scale)
        out_THD[group.rows] = o_BHTD.transpose(1, 2).flatten(0, 1)
        answered.update(requests)
    return [i for i in left if i not in answered]


def _group(layer: BlockLayer, batch: Batch, requests: list[int], count: int, device: torch.device) -> _Group:
    tails, page = batch.tails, layer.page.tokens
    assert tails is not None
    owns = [tails.pieces[i][0].own for i in requests]
    entries = [tails.entries[own] for own in owns]
    pooled = min(entries) >= 0
    windows = entries if pooled else range(len(requests))
    lengths_B4 = torch.tensor([
        [(batch.lengths[i] - 1) // page, window, (batch.lengths[i] - 1) % page + 1, -1]
        for i, window in zip(requests, windows, strict=True)
    ], dtype=torch.int32)  # fmt: skip
    lengths_B4 = sent(lengths_B4, device)
    first, last = requests[0], requests[-1]
    chosen = slice(first, last + 1) if last - first + 1 == len(requests) else sent(torch.tensor(requests), device)
    if batch.entries is not None:
        lengths_B4[:, 3] = batch.entries[chosen]
    starts = [batch.starts[i] for i in requests]
    return _Group(requests, _rows(starts, count, device), batch.table[chosen], lengths_B4, None if pooled else owns)


def _rows(starts: Sequence[int], count: int, device: torch.device) -> slice | Tensor:
    """The rows of `count` queries from each start on: a slice, where they are side by side."""
    if all(start == starts[0] + i * count for i, start in enumerate(starts)):
        return slice(starts[0], starts[0] + len(starts) * count)
    return sent((torch.tensor(starts)[:, None] + torch.arange(count)).flatten(), device)
