"""The contract of a path, one way to answer queries from what a layer holds, and the path that answers every query.

`Reference` is the torch reference of the decode kernels: encoded blocks, exact
sinks, exact window. Scores of every part are put side by side, so that one softmax serves all; each part's values are
then mixed with its share of the weights. Each sink has a column of scores; with padding, where sinks may stand
anywhere, its slot in the block keeps a column too, which is masked. Blocks whose codec has a packed reader are attended
to without decoding (`codec/packed.py`), others are decoded run by run. Long prompts are worked through in slices of
queries, so that scores take a bounded amount of memory.

G query heads share a KV head; N = G · T rows of queries per KV head · X columns: tokens in blocks, sinks if there are
blocks, window.

Differs: kernels, which cannot see all scores at once, merge parts by their log-sum-exp.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.ops.dense import capped
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore, Run

SCORES = 1 << 25  # scores held at once
_LEAST = torch.finfo(torch.float32).min
_PACKED = 64  # rows of queries per KV head up to which blocks are not decoded
# takes a layer's weights [B, H, G, queries, tokens], slice after slice, and the slots of these queries; it may keep no
# tensor of them
Observer = Callable[[LayerStore, Tensor, range], None]


class Query(NamedTuple):
    """A question to a layer: queries [B, query heads, T, D], those of the newest T tokens, to attend to all it holds.

    mask    bool [B or 1, 1, T, all tokens], True where a query sees a token; None: causal, nothing padded
    scale   what scores are multiplied with
    cap     bound of a score, which is cap · tanh(score / cap); None: there is none
    """

    store: LayerStore
    q_BHTD: Tensor
    mask: Tensor | None
    scale: float
    cap: float | None = None


class Attended(NamedTuple):
    """The result of attention.

    out_BHTD  of the shape of the queries
    lse_BHT   log2 Σ 2^s of their scores, [B, query heads, T]; None from a path that reports the weights themselves
    """

    out_BHTD: Tensor
    lse_BHT: Tensor | None


class Path(ABC):
    """One way to attend."""

    @abstractmethod
    def attend(self, query: Query) -> Attended | None:
        """Attend; None: these queries, or this layer, are not for this path."""


def newest_weights(query: Query, lse_BHT: Tensor) -> Tensor:
    """Return the newest query's weights over the window, for a path that reports `lse`: [B, H, G, 1, W]."""
    heads = query.store.codecs[0].geometry.kv_heads
    k_BH1WD = by_head(query.store.window_2BTC[0], heads)[:, :, None]
    q_BHG1D, lse_BHG1 = (x[:, :, -1:].float().unflatten(1, (heads, -1)) for x in (query.q_BHTD, lse_BHT))
    bound = None if query.cap is None else query.cap / math.log(2)
    return (capped(q_BHG1D @ k_BH1WD.mT * (query.scale / math.log(2)), bound) - lse_BHG1[..., None]).exp2()


class Reference(Path):
    """Answers every query.

    observer   takes the weights
    levels     whether it reports log2 Σ 2^s too; what observes the weights needs none
    """

    levels = False

    def __init__(self, decoder: Decoder, observer: Observer | None = None):
        self.decoder, self.positions, self.observer = decoder, decoder.positions, observer
        self._heads = decoder.geometry.kv_heads

    def attend(self, query: Query) -> Attended | None:
        q_BHTD, mask = query.q_BHTD, query.mask
        batch, heads, count, _ = q_BHTD.shape
        if not batch or not count:
            return Attended(torch.empty_like(q_BHTD), None)
        length = query.store.length
        step = max(1, SCORES // (batch * heads * length))
        if mask is None and count > 1:
            mask = causal(count, length, q_BHTD.device)
        elif mask is not None and self.positions.tokens_BT is not None:
            held = self.positions.tokens_BT[:, None, None].long()
            mask = mask.expand(batch, -1, -1, -1).gather(-1, held.expand(-1, 1, count, -1))
        slots = range(length - count, length)
        if count <= step:
            return self._attend(query._replace(mask=mask), slots)
        out: list[Attended] = []
        for start in range(0, count, step):
            part = slice(start, start + step)
            seen = None if mask is None else mask[:, :, part]
            out.append(self._attend(query._replace(q_BHTD=q_BHTD[:, :, part], mask=seen), slots[part]))
        levels = [part.lse_BHT for part in out if part.lse_BHT is not None]
        return Attended(torch.cat([part.out_BHTD for part in out], 2), torch.cat(levels, 2) if levels else None)

    def _attend(self, query: Query, slots: range) -> Attended:
        store, q_BHTD, mask, scale, cap = query
        batch, heads, count, size = q_BHTD.shape
        held, padded = self._heads, self.positions.real_BT is not None
        # the first tokens that have no column in their block: all sinks if their place is known
        hidden = store.front if store.front and store.sizes[0] >= store.front and not padded else 0
        q_YND = (q_BHTD.float() * scale).reshape(batch * held, heads // held * count, size)
        s_YNX = self._scores(store, q_YND, hidden)
        if cap is not None:
            s_YNX = capped(s_YNX, cap)
        by_query = (batch, held, heads // held, count, -1)
        if mask is not None or padded or store.front != hidden:
            s_YNX.view(by_query).masked_fill_(~self._seen(store, mask, hidden)[:, :, None], _LEAST)
        p_YNX = s_YNX.softmax(-1)
        if self.observer is not None:
            self.observer(store, self._by_token(store, p_YNX.view(by_query), hidden), slots)
        level = None
        if self.levels:  # the largest weight is e^(largest score - log Σ e^s)
            level = ((s_YNX.amax(-1) - p_YNX.amax(-1).log()) / math.log(2)).view(q_BHTD.shape[:3])
        return Attended(self._mix(store, p_YNX, hidden).view(q_BHTD.shape).to(q_BHTD.dtype), level)

    def _scores(self, store: LayerStore, q_YND: Tensor, hidden: int) -> Tensor:
        """Return q · k by column: [Y, N, X]."""
        exact = torch.bmm(q_YND, store.exact_YTD(0).mT)
        if not store.blocks:
            return exact
        reader, parts = store.codecs[0].packed_reader, list[Tensor]()
        if reader is not None and q_YND.shape[1] <= _PACKED:
            for run, blocks in zip(store.runs, store.packed(0, hidden), strict=True):
                angles = partial(self.positions.by_segment, *store.tokens(run))
                parts.append(reader.scores(q_YND, blocks, angles))
        else:
            for run in store.runs:
                parts.append(torch.bmm(q_YND, self._decoded(store, 0, run, hidden).mT))
        return torch.cat([*parts, exact], -1)

    def _mix(self, store: LayerStore, p_YNX: Tensor, hidden: int) -> Tensor:
        """Return the sum of values with the weights of their columns: [Y, N, D]."""
        if not store.blocks:
            return torch.bmm(p_YNX, store.exact_YTD(1))
        first, *rest = store.sizes
        sizes = [first - hidden, *rest, p_YNX.shape[2] - store.encoded + hidden]
        *parts, exact = p_YNX.split_with_sizes(sizes, -1)
        reader: Any = store.codecs[1].packed_reader  # of values, which has `mix`
        mixed = list[Tensor]()
        if reader is not None and p_YNX.shape[1] <= _PACKED:
            for part, blocks in zip(parts, store.packed(1, hidden), strict=True):
                mixed.append(reader.mix(part, blocks))
        else:
            for part, run in zip(parts, store.runs, strict=True):
                mixed.append(torch.bmm(part, self._decoded(store, 1, run, hidden)))
        return torch.baddbmm(sum(mixed[1:], mixed[0]), exact, store.exact_YTD(1))

    def _decoded(self, store: LayerStore, role: int, run: Run, hidden: int) -> Tensor:
        """Return keys (0) or values (1) of a slab that have columns, [Y, T, D]; good until the next."""
        x_BTC = self.decoder.run(store.layer, role, run)[:, 0 if run[0] else hidden :].float()
        batch, tokens, width = x_BTC.shape
        x_BTHD = x_BTC.view(batch, tokens, self._heads, width // self._heads)
        return x_BTHD.transpose(1, 2).flatten(0, 1)

    def _columns(self, store: LayerStore, hidden: int) -> tuple[Tensor, Tensor]:
        """Return the token of each column, and False for a column that stands for no token, [B or 1, X] each."""
        encoded, device = store.encoded, store.buffer_2BTC.device
        tokens = torch.arange(store.length, device=device)[None]
        seen = torch.ones_like(tokens, dtype=torch.bool)
        if store.front == hidden:
            sinks, blocks, window = tokens.split([hidden, encoded - hidden, store.length - encoded], 1)
            return torch.cat([blocks, sinks, window], 1), seen
        slots, arrived = self.positions.sink_slots(store.window.sinks, store.rows, device)
        moved = arrived & (slots < encoded)
        blocks, window = (x.expand(len(slots), -1).split([encoded, store.length - encoded], 1) for x in (tokens, seen))
        (first, last), (held, exact) = blocks, window
        held = held & ~((first[:, None] == slots[..., None]) & moved[..., None]).any(1)
        return torch.cat([first, slots.clamp(max=store.length - 1), last], 1), torch.cat([held, moved, exact], 1)

    def _seen(self, store: LayerStore, mask: Tensor | None, hidden: int) -> Tensor:
        """Return the columns that each query sees, bool [B or 1, 1, T or 1, X]."""
        tokens, seen = (x[:, None] for x in self._columns(store, hidden))
        return seen[:, :, None] if mask is None else visible(mask, tokens, seen)

    def _by_token(self, store: LayerStore, p_BHGTX: Tensor, hidden: int) -> Tensor:
        """Return weights of columns, by token: [B, H, G, T, all tokens]."""
        if not store.front:
            return p_BHGTX
        tokens = self._columns(store, hidden)[0][:, None, None, None]
        p_BHGTT = p_BHGTX.new_zeros(*p_BHGTX.shape[:4], store.length)
        return p_BHGTT.scatter_add_(-1, tokens.expand(p_BHGTX.shape), p_BHGTX)


def visible(mask: Tensor, tokens_BHX: Tensor, seen_BHX: Tensor) -> Tensor:
    """Return the columns that each query sees, bool [B, H, T, X], from a mask [B or 1, 1, T, all tokens].

    tokens_BHX   which token each column is of, [B or 1, H, X]          seen_BHX   whether it stands for it
    """
    rows, heads, columns = tokens_BHX.shape
    rows, count = max(rows, len(mask)), mask.shape[2]
    at = tokens_BHX[:, :, None].expand(rows, heads, count, columns)
    return seen_BHX[:, :, None] & mask.expand(rows, heads, -1, -1).gather(-1, at)


def by_head(x_BTC: Tensor, heads: int) -> Tensor:
    """Split channels by head: [B, H, T, D], float32, a view if it is float32 already."""
    batch, tokens, width = x_BTC.shape
    return x_BTC.float().view(batch, tokens, heads, width // heads).transpose(1, 2)


def causal(count: int, length: int, device: torch.device) -> Tensor:
    """Return the causal mask of the newest `count` tokens: each sees itself and all before, bool [1, 1, T, length]."""
    return torch.ones(count, length, dtype=torch.bool, device=device).tril_(length - count)[None, None]
