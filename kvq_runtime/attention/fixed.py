"""Hold a layer's keys or values where the decode kernel finds them: blocks by a table, tokens by counts, on the device.

What a step changes on the device depends on these counts alone, in memory that stays where it is. Imports the kernels.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec import Codec
from kvq_runtime.ops import dispatch
from kvq_runtime.stream import SLAB, Stream

_SLACK = 64  # tokens that one step may add where the window is


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
        room = min(len(self._ahead), self._buffer.shape[1] - self._stop)
        if self.stale or self._buffer is not self._fixed or count > room:
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
        if self._fixed is None or len(self._fixed) != self.rows or self._fixed.shape[1] < sinks + live:
            self._fixed = self._buffer.new_empty(self.rows, steady, self._buffer.shape[2])
        self._fixed[:, : sinks + live] = held.clone() if self._buffer is self._fixed else held
        self._hold(self._fixed)
        self._start, self._stop = sinks, sinks + live
        self.stale = True

    def keep_sinks(self, rows: Tensor, ranks: Tensor, x_MC: Tensor) -> None:
        super().keep_sinks(rows, ranks, x_MC)
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
            self._hold(self._fixed.copy_(self._buffer))

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
