"""Keep a layer where the decode kernel reads it, and attend there: packed, in one launch and a merge.

A step asks the device nothing. Blocks lie in the slabs of `stream.py`, which a table on the device finds; blocks and
tokens are counted on the device too, a new token goes where those counts say, and windows, counts and tables stay where
they are. So a step can be recorded as one CUDA graph and replayed, token after token (`captured`). A flush is eager, at
a step that the host knows; it writes table and counts anew.

Imports the kernels, and with them triton, when the first layer is kept so: see `ops/dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvq_runtime import tall
from kvq_runtime.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.history import History
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.select import Chunks, Heavy
from kvq_runtime.stream import SLAB, Stream
from kvq_runtime.timeline import Timeline

if TYPE_CHECKING:
    from kvq_runtime.cache import BlockCache

T = TypeVar("T")
_SLACK = 64  # tokens that one step may add where the window is
COST = "at every step its history is decoded, a slab at a time: 4 · tokens · width bytes written and read in a layer"


def refusal(recipe: Recipe, geometry: Geometry, layer: int = 0) -> str | None:
    """Why no kernel attends to this layer's blocks as they lie, and what that costs; None: one does."""
    reason = _reason(recipe, geometry, layer)
    return reason and f"{recipe.name}, layer {layer}: {reason}; {COST}"


def _reason(recipe: Recipe, geometry: Geometry, layer: int) -> str | None:
    key, value = recipe.at(layer)
    if not dispatch.available():
        return "triton is not installed (pip install 'kvq-runtime[triton]')"
    if recipe.window is not None or isinstance(recipe.select, Heavy):
        return "its window follows the attention weights, which the kernel does not hand out"
    if isinstance(recipe.select, Chunks):
        return "it reads the chunks that each query asks for"
    if recipe.online is not None:
        return "each row has a codec of its own"
    if key.window != value.window:
        return "keys and values have different sinks, recent or block"
    for half, side, position in (("keys", key, recipe.position), ("values", value, "post")):
        if dispatch.kernels("layout").layout(side, geometry, position) is None:
            return f"there is no kernel for its {half}"
    return None


@lru_cache(maxsize=64)
def _reader(side: Side, geometry: Geometry, position: str, device: torch.device) -> Any:
    """How a side's blocks are read, with the tables of that on the device; all layers share them."""
    layout = dispatch.kernels("layout").layout(side, geometry, position)
    return dispatch.kernels("attention").Encoded.of(layout, torch.empty(0, device=device))


class FixedStream(Stream):
    """A Stream whose window stays in one place, with what the kernel finds it by.

    read      how the kernel reads the blocks, an Encoded of kernels/attention.py
    counts    int32 [3]: blocks, the window's first place in its buffer, its tokens
    table     the slabs, see kernels/slabs.py; with room for `max_tokens`, and made anew beyond them
    """

    def __init__(self, codec: Codec, like_BTC: Tensor, reader: Any, max_tokens: int):
        super().__init__(codec, len(like_BTC), like_BTC.dtype, like_BTC.device)
        self.read = reader
        self._fixed: Tensor | None = None
        self.counts = torch.zeros(3, dtype=torch.int32, device=like_BTC.device)
        self._ahead = torch.arange(_SLACK, device=like_BTC.device)
        self._listed: list[tuple[int, int]] = []
        self._make_table(-(-max_tokens // (SLAB * self.side.block)))
        self.kept_BSC = self.sinks_BSC.clone()
        self.stale = True  # whether the device does not know yet how many blocks and tokens there are, and where

    def _make_table(self, room: int) -> None:
        names = self.read.layout.names
        self.table = torch.zeros(room, 1 + len(names), dtype=torch.int64, device=self.counts.device)
        self.read = replace(self.read, addresses=self.table)
        self._listed.clear()

    def append(self, x_BTC: Tensor) -> None:
        count = x_BTC.shape[1]
        if self.stale or self._buffer is not self._fixed or self._stop + count > self._buffer.shape[1]:
            super().append(x_BTC)
            self.stale = True
            return
        self._buffer.index_copy_(1, self.counts[1:].sum() + self._ahead[:count], x_BTC)
        self.counts[2:].add_(count)
        self._stop += count

    @property
    def places(self) -> tuple[int, ...]:
        """Where the kernel finds this stream."""
        return tuple(tensor.data_ptr() for tensor in (self._buffer, self.kept_BSC, self.counts, self.table))

    def trim(self) -> None:
        """Move sinks and window to the front of the place that is theirs."""
        sinks, live = self.side.sinks, self._stop - self._start
        steady = sinks + self.recent + self.side.block + _SLACK
        if (self._buffer is self._fixed and self._start == sinks) or sinks + live > steady:
            return
        held = self._buffer[:, self._start - sinks : self._stop]
        if self._fixed is None or len(self._fixed) != self.rows:
            self._fixed = self._buffer.new_empty(self.rows, steady, self._buffer.shape[2])
        self._fixed[:, : sinks + live] = held.clone() if self._buffer is self._fixed else held
        self._buffer, self._start, self._stop = self._fixed, sinks, sinks + live
        self.stale = True

    def hold(self, rows: Tensor, ranks: Tensor, x_MC: Tensor) -> None:
        super().hold(rows, ranks, x_MC)
        self.stale = True

    def store(self, fields: dict[str, Tensor]) -> None:
        super().store(fields)
        self.stale = True

    def crop(self, length: int, survivors_BTC: Tensor | None) -> None:
        self.stale = True
        super().crop(length, survivors_BTC)
        self._listed.clear()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._listed.clear()
        self.stale = True
        if self._fixed is not None and self._fixed.shape == self._buffer.shape:
            self._buffer = self._fixed.copy_(self._buffer)

    def publish(self) -> None:
        """Tell the device what it does not know yet."""
        if not self.stale:
            return
        if len(self.slabs) > len(self.table):
            self._make_table(2 * len(self.slabs))
        for place, slab in enumerate(self.slabs):
            codes = slab[self.read.layout.names[0]]
            at = (codes.data_ptr(), codes.shape[1])
            if self._listed[place : place + 1] != [at]:
                self._listed[place:] = [at]
                row = dispatch.kernels("slabs").table([slab], self.read.layout.names, 1, self.table.device)
                self.table[place : place + 1].copy_(row)
        self.counts.copy_(torch.tensor([self.blocks, self._start, self._stop - self._start], dtype=torch.int32))
        if self.kept_BSC.shape == self.sinks_BSC.shape:
            self.kept_BSC.copy_(self.sinks_BSC)
        else:
            self.kept_BSC = self.sinks_BSC.clone(memory_format=torch.contiguous_format)
        self.stale = False

    def bytes(self) -> dict[str, int]:
        found = super().bytes()
        own = (self.counts, self._ahead, self.table, self.kept_BSC)
        found["tables"] = sum(tensor.untyped_storage().nbytes() for tensor in own)
        if self._fixed is not None and self._fixed is not self._buffer:
            found["window"] += self._fixed.untyped_storage().nbytes()
        return found


class Fused:
    """What the layers of a cache share that are read by the kernel.

    max_tokens   what tables have room for, and the number of splits is chosen for
    """

    def __init__(self, recipe: Recipe, geometry: Geometry, timeline: Timeline, max_tokens: int):
        self.recipe, self.geometry, self.timeline, self.max_tokens = recipe, geometry, timeline, max_tokens
        self.shared: list[Tensor] = []  # codebooks and rotations, as the kernel wants them
        self._turns: Any = None
        self._starts_B = torch.empty(0)
        self.forget()

    def forget(self) -> None:
        """Look at padding and positions again: rows or tokens are others."""
        self._length, self._real, self._counted = -1, False, False

    def pair(self, layer: int, codecs: tuple[Codec, Codec], k_BTC: Tensor) -> tuple[FixedStream, FixedStream] | None:
        """The streams of a layer that the kernel reads, for keys like these; None where it reads none."""
        if not dispatch.runs_kernel(k_BTC) or _reason(self.recipe, self.geometry, layer):
            return None
        positions = (self.recipe.position, "post")
        readers = [
            _reader(codec.side, self.geometry, position, k_BTC.device)
            for codec, position in zip(codecs, positions, strict=True)
        ]
        self.shared += [x for reader in readers for x in (reader.lookup, reader.turn) if x is not None]
        keys, values = (FixedStream(*one, self.max_tokens) for one in zip(codecs, (k_BTC, k_BTC), readers, strict=True))
        return keys, values

    def attend(self, history: History, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
        """As BlockCache.attend; None where the torch path has to answer.

        A mask is taken to be that of the padding announced with this pass; one that was not announced is not the
        kernel's. Nor are padded slots after a row's first real one, or keys before RoPE that do not turn whole, or not
        by their place after the padding. More rows of queries than its tile has attend slab by slab (tall.py).
        """
        (keys, values), (batch, heads, count, _) = history.layers[layer], q_BHTD.shape
        if not (isinstance(keys, FixedStream) and isinstance(values, FixedStream)) or not batch * count:
            return None
        if mask is not None and not self.timeline.told:
            return None
        self.look(batch, count, q_BHTD.device)
        if not self._real:
            return None
        attention, held = dispatch.kernels("attention"), self.geometry.kv_heads
        if heads // held * count > attention.ROWS:
            return tall.attend(history, layer, q_BHTD, self._starts_B, scale)
        if not self.regular:
            return None
        for stream in (keys, values):
            stream.publish()
        exact = attention.Exact(keys._buffer, values._buffer, keys.kept_BSC, values.kept_BSC)
        splits = dispatch.kernels("launch").splits(batch * held, self.max_tokens // keys.side.block, q_BHTD.device)
        turns = self._tables(keys) if self.recipe.position == "pre" else None
        return attention.attend(
            q_BHTD, keys.read, values.read, exact, keys.counts, self._starts_B, scale, splits, turns
        )[0]

    @property
    def regular(self) -> bool:
        """Whether the kernel may answer: padding is on the left, and keys before RoPE turn whole, by their place after it."""
        turned = self.recipe.position == "post" or 2 * self.timeline.half == self.geometry.head_size
        return self._real and turned and (self._counted or self.recipe.position == "post")

    def look(self, batch: int, count: int, device: torch.device) -> None:
        """Find each row's first real slot, int32 [B]: once in a pass, and not while steps say nothing of padding."""
        length, last = self.timeline.length, self._length
        self._length = length
        if length == last or (length == last + 1 and count == 1 and not self.timeline.told):
            return
        starts_B, self._real, self._counted = self.timeline.starts(batch, device)
        if len(self._starts_B) != batch:
            self._starts_B = starts_B
        self._starts_B.copy_(starts_B)

    def _tables(self, keys: FixedStream) -> Any:
        """What turns keys before RoPE, for as many blocks as the table has room for."""
        blocks, rotary = len(keys.table) * SLAB + 1, self.timeline.require()
        if self._turns is None or len(self._turns.bases_N2K) < blocks:
            frequencies_K = rotary.frequencies_K.to(keys.table.device)
            self._turns = dispatch.kernels("attention").Turns.of(frequencies_K, rotary.scaling, keys.side.block, blocks)
        return self._turns

    @property
    def tensors(self) -> list[Tensor]:
        """What is held beside the streams."""
        return [self._starts_B, *(self._turns or ())]


def captured(cache: BlockCache, step: Callable[[], T], record: Callable = lambda step: _graph(step)) -> Callable[[], T]:
    """Record a decode step of one token as a CUDA graph; return what takes that step, again and again.

    step     a forward pass from tensors to tensors that stay where they are: fill in the token, and its position,
             before each call. It runs once here, and is undone. Its token is taken to be real and to follow the last.
    record   makes of a step (its result, what replays it)

    What is returned gives the step's own result, to be read before the next call; it encodes what is due.
    Raises RuntimeError where a layer is not read by the kernel, where the very next step flushes, and, when called,
    where rows have been selected or the cache was reset, so that what was recorded is elsewhere.
    """
    streams = [stream for pair in cache.layers.values() for stream in pair]
    fixed = [stream for stream in streams if isinstance(stream, FixedStream)]
    if not fixed or len(fixed) < len(streams) or len(cache.layers) < len(cache.held):
        reason = refusal(cache.recipe, cache.geometry) or "no tokens yet, or they are not on a GPU"
        raise RuntimeError(f"a step of this cache is no graph: {reason}")
    if any(stream.beyond(stream.recent, 1) for stream in fixed):
        raise RuntimeError("the next step encodes a block; take it first, then record")
    sinks, length = fixed[0].side.sinks, cache.timeline.length
    if cache.timeline.complete(sinks, length) > length:
        raise RuntimeError(f"a row has fewer than its {sinks} exact first tokens; take a few steps first, then record")
    cache.fused.look(fixed[0].rows, 1, fixed[0].counts.device)
    if not cache.fused.regular:
        raise RuntimeError(
            "tokens are padded among or after the real ones, or RoPE turns a part of a head; do not record"
        )
    with _undone(cache, fixed):
        step()
    for stream in fixed:
        stream.stale = True
        stream.publish()
    with _undone(cache, fixed):
        out, replay = record(step)
    places = [stream.places for stream in fixed]

    def again() -> T:
        now = [stream for pair in cache.layers.values() for stream in pair]
        if list(map(id, now)) != list(map(id, fixed)) or [stream.places for stream in fixed] != places:
            raise RuntimeError("the cache is not where it was when the step was recorded; record it again")
        for stream in fixed:
            stream.publish()
        replay()
        cache.advance()
        return out

    return again


@contextmanager
def _undone(cache: BlockCache, streams: list[FixedStream]) -> Iterator[None]:
    """Forget what the host counts in a step."""
    length, stops = cache.timeline.length, [stream._stop for stream in streams]
    cache.timeline.recorded = True
    try:
        yield
    finally:
        cache.timeline.recorded, cache.timeline.length = False, length
        for stream, stop in zip(streams, stops, strict=True):
            stream._stop = stop


def _graph(step: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return out, graph.replay
