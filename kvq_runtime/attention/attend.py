"""Attend to what a layer holds: encoded blocks, exact sinks, exact window. The torch reference of the decode kernels.

Scores of every part are put side by side, so that one softmax serves all; each part's values are then mixed with its
share of the weights. A sink has a column of its own; under padding, where sinks may stand anywhere, also one in its
block, which nobody sees. Blocks whose codec allows it are met as they lie (see `fold.py`), others are decoded run by
run. Long prompts are worked through in slices of queries, so that scores take a bounded amount of memory.

G query heads share a KV head; N = G · T rows of queries per KV head · X columns: tokens in blocks, sinks if there are
blocks, window.

Differs: kernels, which cannot see all scores at once, merge parts by their log-sum-exp (`ops/attention.py`).
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

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
    slots = range(length - count, length)
    if count <= step:
        return _attend(history, layer, q_BHTD, mask, scale, slots, observer)
    out = []
    for start in range(0, count, step):
        part = slice(start, start + step)
        seen = None if mask is None else mask[:, :, part]
        out.append(_attend(history, layer, q_BHTD[:, :, part], seen, scale, slots[part], observer))
    return torch.cat(out, 2)


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
    batch, heads, count, size = q_BHTD.shape
    held = history.geometry.kv_heads
    q_YND = (q_BHTD.float() * _factor(scale)).reshape(batch * held, heads // held * count, size)
    s_YNX = _scores(history, layer, q_YND)
    by_query = (batch, held, heads // held, count, -1)
    if mask is not None or history.timeline.real_BT is not None or keys.front != _hidden(history, keys):
        s_YNX.view(by_query).masked_fill_(~_seen(history, keys, mask, count)[:, :, None], _LEAST)
    p_YNX = s_YNX.softmax(-1)
    if observer is not None:
        observer(layer, _by_token(history, keys, p_YNX.view(by_query)), slots)
    if keys.encoded != values.encoded or keys.front != values.front:
        p_BHGTT = _by_token(history, keys, p_YNX.view(by_query))
        p_YNX = _by_column(history, values, p_BHGTT).flatten(0, 1).flatten(1, 2)
    return _mix(history, layer, p_YNX).view(q_BHTD.shape).to(q_BHTD.dtype)


def _scores(history: History, layer: int, q_YND: Tensor) -> Tensor:
    """q · k by column: [Y, N, X]."""
    stream = history.layers[layer][0]
    if not stream.blocks:
        return torch.bmm(q_YND, stream.exact_YTD.mT)
    if stream.fold is not None and q_YND.shape[1] <= _FOLDED:
        parts = [stream.fold.scores(q_YND, laid) for laid in stream.laid(_hidden(history, stream))]
    else:
        parts = [torch.bmm(q_YND, k_YTD.mT) for k_YTD in _decoded(history, layer, 0)]
    return torch.cat([*parts, torch.bmm(q_YND, stream.exact_YTD.mT)], -1)


def _mix(history: History, layer: int, p_YNX: Tensor) -> Tensor:
    """The sum of values with the weights of their columns: [Y, N, D]."""
    stream = history.layers[layer][1]
    if not stream.blocks:
        return torch.bmm(p_YNX, stream.exact_YTD)
    hidden = _hidden(history, stream)
    first, *rest = stream.sizes
    sizes = [first - hidden, *rest, p_YNX.shape[2] - stream.encoded + hidden]
    *parts, exact = p_YNX.split_with_sizes(sizes, -1)
    if stream.fold is not None and p_YNX.shape[1] <= _FOLDED:
        mixed = [stream.fold.mix(*part) for part in zip(parts, stream.laid(hidden), strict=True)]
    else:
        mixed = [torch.bmm(*part) for part in zip(parts, _decoded(history, layer, 1), strict=True)]
    return torch.baddbmm(sum(mixed[1:], mixed[0]), exact, stream.exact_YTD)


def _decoded(history: History, layer: int, half: int) -> Iterator[Tensor]:
    """Keys (half 0) or values (1) that have columns in blocks, slab by slab, [Y, T, D]; good until the next."""
    stream, heads = history.layers[layer][half], history.geometry.kv_heads
    for run in stream.runs():
        yield _heads(history.run(layer, half, run)[:, 0 if run[0] else _hidden(history, stream) :], heads)


def _hidden(history: History, stream: Stream) -> int:
    """How many of the first tokens have no column in their block: all sinks, where they are known to stand there."""
    known = stream.front and stream.sizes[0] >= stream.front and history.timeline.real_BT is None
    return stream.front if known else 0


def _columns(history: History, stream: Stream) -> tuple[Tensor, Tensor]:
    """Which token each column is of, and whether it stands for it rather than for nothing, [B or 1, X] each."""
    encoded, device, hidden = stream.encoded, stream.sinks_BSC.device, _hidden(history, stream)
    tokens = torch.arange(stream.length, device=device)[None]
    seen = torch.ones_like(tokens, dtype=torch.bool)
    if stream.front == hidden:
        sinks, blocks, window = tokens.split([hidden, encoded - hidden, stream.length - encoded], 1)
        return torch.cat([blocks, sinks, window], 1), seen
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


def _by_token(history: History, stream: Stream, p_BHGTX: Tensor) -> Tensor:
    """Weights of a stream's columns, by token: [B, H, G, T, all tokens]."""
    if not stream.front:
        return p_BHGTX
    tokens = _columns(history, stream)[0][:, None, None, None]
    p_BHGTT = p_BHGTX.new_zeros(*p_BHGTX.shape[:4], stream.length)
    return p_BHGTT.scatter_add_(-1, tokens.expand(p_BHGTX.shape), p_BHGTX)


def _by_column(history: History, stream: Stream, p_BHGTT: Tensor) -> Tensor:
    """Weights of tokens, by a stream's columns: [B, H, G, T, X]."""
    tokens, seen = (x[:, None, None, None] for x in _columns(history, stream))
    return p_BHGTT.gather(-1, tokens.expand(*p_BHGTT.shape[:4], -1)) * seen


@lru_cache(maxsize=8)
def _factor(scale: float) -> Tensor:
    """A number as a tensor, which every product with a float would make anew."""
    with torch.inference_mode(False):
        return torch.tensor(scale)


def _heads(x_BTC: Tensor, heads: int) -> Tensor:
    """[Y, T, D], float32: where it lies, for a single row."""
    batch, tokens, width = x_BTC.shape
    return x_BTC.float().view(batch, tokens, heads, -1).transpose(1, 2).reshape(-1, tokens, width // heads)


def causal(count: int, length: int, device: torch.device) -> Tensor:
    """Which tokens each of the newest `count` sees: itself and all before, bool [1, 1, T, length]."""
    return torch.ones(count, length, dtype=torch.bool, device=device).tril_(length - count)[None, None]
