"""Attend to what a layer holds: encoded blocks, exact sinks, exact window. The torch reference of the decode kernels.

Scores of every part are put side by side, so that one softmax serves all; each part's values are then mixed with its
share of the weights. Blocks whose codec allows it are met as they lie (see `fold.py`), others are decoded run by run.
Long prompts are worked through in slices of queries, so that scores take a bounded amount of memory.

G query heads share a KV head; N = G · T rows of queries per KV head.

Differs: kernels, which cannot see all scores at once, merge parts by their log-sum-exp (`ops/attention.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.history import History
from kvq_runtime.stream import Stream

SCORES = 1 << 25  # scores held at once
_FOLDED = 64  # rows of queries per KV head up to which blocks are not decoded
# is told the layer, its weights [B, H, G, queries, tokens], slice after slice, and the slots of these queries; it may
# keep none of the tensor
Observer = Callable[[int, Tensor, range], None]


def attend(
    history: History, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float, observer: Observer | None = None
) -> Tensor:
    """See BlockCache.attend."""
    batch, heads, count, _ = q_BHTD.shape
    if not batch or not count:
        return torch.empty_like(q_BHTD)
    length = history.layers[layer][0].length
    step = max(1, SCORES // (batch * heads * length))
    if mask is None and count > 1:
        mask = causal(count, length, q_BHTD.device)
    elif mask is not None and history.timeline.tokens_BT is not None:
        held = history.timeline.tokens_BT[:, None, None].long()
        mask = mask.expand(batch, -1, -1, -1).gather(-1, held.expand(-1, 1, count, -1))
    slots, out = range(length - count, length), []
    for start in range(0, count, step):
        part = slice(start, start + step)
        seen = None if mask is None else mask[:, :, part]
        out.append(_attend(history, layer, q_BHTD[:, :, part], seen, scale, slots[part], observer))
    return torch.cat(out, 2) if len(out) > 1 else out[0]


def _attend(
    history: History,
    layer: int,
    q_BHTD: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: range,
    observer: Observer | None,
) -> Tensor:
    heads, count = history.geometry.kv_heads, q_BHTD.shape[2]
    q_BHND = (q_BHTD.float() * scale).reshape(len(q_BHTD), heads, -1, q_BHTD.shape[-1])
    s_BHNT = _scores(history, layer, q_BHND)
    if mask is not None:
        s_BHGTT = s_BHNT.unflatten(2, (-1, count))
        s_BHGTT.masked_fill_(~mask[:, :, None], torch.finfo(s_BHNT.dtype).min)
    p_BHNT = s_BHNT.softmax(-1)
    if observer is not None:
        observer(layer, p_BHNT.unflatten(2, (-1, count)), slots)
    out = _mix(history, layer, p_BHNT)
    return out.view(q_BHTD.shape).to(q_BHTD.dtype)


def _scores(history: History, layer: int, q_BHND: Tensor) -> Tensor:
    """q · k of all tokens, with the exact keys of sinks: [B, H, N, T]."""
    stream = history.layers[layer][0]
    folded = stream.fold if q_BHND.shape[2] <= _FOLDED else None
    parts = []
    for run in stream.runs():
        if folded is not None:
            parts.append(folded.scores(q_BHND, stream.fields(*run)))
        else:
            parts.append(_dot(q_BHND, history.run(layer, 0, run)))
    parts.append(_dot(q_BHND, stream.window_BTC))
    s_BHNT = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    if stream.side.sinks and stream.encoded:
        sinks = _dot(q_BHND, stream.sinks_BSC)
        slots, arrived = _slots(history, stream)
        if slots is None:
            s_BHNT[..., : sinks.shape[-1]] = sinks
        else:
            index = slots[:, None, None].expand(*s_BHNT.shape[:3], -1)
            s_BHNT.scatter_add_(-1, index, (sinks - s_BHNT.gather(-1, index)) * arrived[:, None, None])
    return s_BHNT


def _mix(history: History, layer: int, p_BHNT: Tensor) -> Tensor:
    """The sum of values with these weights, exact ones for sinks: [B, H, N, D]. The weights are used up."""
    stream = history.layers[layer][1]
    out = _sum(p_BHNT[..., stream.encoded :], stream.window_BTC)
    if stream.side.sinks and stream.encoded:
        slots, arrived = _slots(history, stream)
        if slots is None:
            own = p_BHNT[..., : stream.side.sinks]
            out += _sum(own, stream.sinks_BSC)
            own.zero_()
        else:
            index = slots[:, None, None].expand(*p_BHNT.shape[:3], -1)
            weights = p_BHNT.gather(-1, index) * (arrived & (slots < stream.encoded))[:, None, None]
            out += _sum(weights, stream.sinks_BSC)
            p_BHNT.scatter_add_(-1, index, -weights)
    folded = stream.fold if p_BHNT.shape[2] <= _FOLDED else None
    for run in stream.runs():
        weights = p_BHNT[..., slice(*stream.tokens(run))]
        if folded is not None:
            out += folded.mix(weights, stream.fields(*run))
        else:
            out += _sum(weights, history.run(layer, 1, run))
    return out


def _slots(history: History, stream: Stream) -> tuple[Tensor | None, Tensor]:
    """Where each row's sinks are, [B, S], and which have arrived; None where they are the first tokens of all rows."""
    if history.timeline.real_BT is None and stream.encoded >= stream.side.sinks:
        return None, stream.sinks_BSC
    slots, arrived = history.timeline.sink_slots(stream.side.sinks, len(stream.sinks_BSC), stream.sinks_BSC.device)
    return slots.clamp(max=stream.length - 1), arrived


def _dot(q_BHND: Tensor, x_BTC: Tensor) -> Tensor:
    """Queries times keys, [B, H, N, T]."""
    batch, heads, rows, _ = q_BHND.shape
    return torch.bmm(q_BHND.reshape(batch * heads, rows, -1), _heads(x_BTC, heads).mT).view(batch, heads, rows, -1)


def _sum(p_BHNT: Tensor, x_BTC: Tensor) -> Tensor:
    """Values by weights, [B, H, N, D]."""
    batch, heads, rows, tokens = p_BHNT.shape
    return torch.bmm(p_BHNT.reshape(batch * heads, rows, tokens), _heads(x_BTC, heads)).view(batch, heads, rows, -1)


def _heads(x_BTC: Tensor, heads: int) -> Tensor:
    """[B · H, T, D], float32: without a copy for a single row."""
    batch, tokens, width = x_BTC.shape
    return x_BTC.float().view(batch, tokens, heads, -1).transpose(1, 2).reshape(batch * heads, tokens, width // heads)


def causal(count: int, length: int, device: torch.device) -> Tensor:
    """Which tokens each of the newest `count` sees: itself and all before, bool [1, 1, T, length]."""
    return torch.ones(count, length, dtype=torch.bool, device=device).tril_(length - count)[None, None]
