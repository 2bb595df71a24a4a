"""Attend to what a layer holds: encoded blocks, exact sinks, exact window. The torch reference of the decode kernels.

Scores of every part are put side by side, so that one softmax serves all; each part's values are then mixed with its
share of the weights. A sink has two columns: one in its block, which nobody sees, and one of its own. Blocks whose
codec allows it are met as they lie (see `fold.py`), others are decoded run by run. Long prompts are worked through in
slices of queries, so that scores take a bounded amount of memory.

G query heads share a KV head; N = G · T rows of queries per KV head · X columns: tokens in blocks, sinks if there are
blocks, window.

Differs: kernels, which cannot see all scores at once, merge parts by their log-sum-exp (`ops/attention.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.history import History
from kvq_runtime.stream import Stream

SCORES = 1 << 25  # scores held at once
_LEAST = torch.finfo(torch.float32).min
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
    keys, values = history.layers[layer]
    batch, _, count, size = q_BHTD.shape
    q_BHND = (q_BHTD.float() * scale).reshape(batch, history.geometry.kv_heads, -1, size)
    s_BHNX = _scores(history, layer, q_BHND)
    if mask is None and history.timeline.real_BT is None and keys.encoded >= keys.side.sinks:
        s_BHNX[..., : keys.front] = _LEAST
    else:
        seen = _seen(history, keys, mask, count)
        s_BHNX.unflatten(2, (-1, count)).masked_fill_(~seen[:, :, None], _LEAST)
    p_BHNX = s_BHNX.softmax(-1)
    if observer is not None:
        observer(layer, _by_token(history, keys, p_BHNX).unflatten(2, (-1, count)), slots)
    if (keys.encoded, keys.front) != (values.encoded, values.front):
        p_BHNX = _by_column(history, values, _by_token(history, keys, p_BHNX))
    return _mix(history, layer, p_BHNX).view(q_BHTD.shape).to(q_BHTD.dtype)


def _scores(history: History, layer: int, q_BHND: Tensor) -> Tensor:
    """q · k by column: [B, H, N, X]."""
    stream = history.layers[layer][0]
    folded = stream.fold if q_BHND.shape[2] <= _FOLDED else None
    parts, heads = [], q_BHND.shape[1]
    for run in stream.runs():
        if folded is not None:
            parts.append(folded.scores(q_BHND, stream.laid(run)))
        else:
            parts.append(q_BHND @ _heads(history.run(layer, 0, run), heads).mT)
    parts.append(q_BHND @ _heads(stream.exact_BTC, heads).mT)
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _mix(history: History, layer: int, p_BHNX: Tensor) -> Tensor:
    """The sum of values with the weights of their columns: [B, H, N, D]."""
    stream = history.layers[layer][1]
    folded = stream.fold if p_BHNX.shape[2] <= _FOLDED else None
    heads = p_BHNX.shape[1]
    out = p_BHNX[..., stream.encoded :] @ _heads(stream.exact_BTC, heads)
    for run in stream.runs():
        start, stop = stream.tokens(run)
        weights = p_BHNX[..., start:stop]
        if folded is not None:
            out += folded.mix(weights, stream.laid(run))
        else:
            out += weights @ _heads(history.run(layer, 1, run), heads)
    return out


def _columns(history: History, stream: Stream) -> tuple[Tensor, Tensor]:
    """Which token each column is of, and whether it stands for it rather than for nothing, [B or 1, X] each."""
    encoded, device = stream.encoded, stream.sinks_BSC.device
    tokens = torch.arange(stream.length, device=device)[None]
    seen = torch.ones_like(tokens, dtype=torch.bool)
    if not stream.front:
        return tokens, seen
    slots, arrived = history.timeline.sink_slots(stream.side.sinks, stream.rows, device)
    moved = arrived & (slots < encoded)
    blocks, window = (x.expand(len(slots), -1).split([encoded, stream.length - encoded], 1) for x in (tokens, seen))
    (first, last), (held, exact) = blocks, window
    held = held & ~((first[:, None] == slots[..., None]) & moved[..., None]).any(1)
    return torch.cat([first, slots.clamp(max=stream.length - 1), last], 1), torch.cat([held, moved, exact], 1)


def _seen(history: History, stream: Stream, mask: Tensor | None, count: int) -> Tensor:
    """Which columns each query sees, bool [B or 1, 1, T or 1, X]."""
    tokens, seen = (x[:, None, None] for x in _columns(history, stream))
    if mask is None:
        return seen
    rows = max(len(mask), len(tokens))
    return seen & mask.expand(rows, -1, -1, -1).gather(-1, tokens.expand(rows, -1, count, -1))


def _by_token(history: History, stream: Stream, p_BHNX: Tensor) -> Tensor:
    """Weights of a stream's columns, by token: [B, H, N, T]."""
    if not stream.front:
        return p_BHNX
    tokens = _columns(history, stream)[0][:, None, None]
    p_BHNT = p_BHNX.new_zeros(*p_BHNX.shape[:3], stream.length)
    return p_BHNT.scatter_add_(-1, tokens.expand(p_BHNX.shape), p_BHNX)


def _by_column(history: History, stream: Stream, p_BHNT: Tensor) -> Tensor:
    """Weights of tokens, by a stream's columns: [B, H, N, X]."""
    tokens, seen = (x[:, None, None] for x in _columns(history, stream))
    return p_BHNT.gather(-1, tokens.expand(*p_BHNT.shape[:3], -1)) * seen


def _heads(x_BTC: Tensor, heads: int) -> Tensor:
    """[B, H, T, D], float32, where it lies."""
    return x_BTC.float().view(*x_BTC.shape[:2], heads, -1).transpose(1, 2)


def causal(count: int, length: int, device: torch.device) -> Tensor:
    """Which tokens each of the newest `count` sees: itself and all before, bool [1, 1, T, length]."""
    return torch.ones(count, length, dtype=torch.bool, device=device).tril_(length - count)[None, None]
