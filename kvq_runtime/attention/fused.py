"""Attend to the layers of a cache with the decode kernel, which reads their blocks packed: one launch and a merge.

A step asks the device nothing: blocks lie in the slabs of `stream.py`, which a table on the device finds; blocks and
tokens are counted on the device too (see fixed.py). So it can be recorded as one CUDA graph (see graph.py).
A flush is eager, at a step that the host knows; it writes table and counts anew.

Imports the kernels, and with them triton, when the first layer is kept so: see ops/dispatch.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.attention import tall
from kvq_runtime.attention.fixed import FixedStream
from kvq_runtime.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.history import History
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.select import Chunks, Heavy
from kvq_runtime.stream import SLAB
from kvq_runtime.timeline import Timeline

COST = "at every step its history is decoded, a slab at a time: 4 · tokens · width bytes written and read in a layer"

MOST = 128  # channels of a head whose mean turns in the tile: more spill on sm_80


def refusal(recipe: Recipe, geometry: Geometry, layer: int = 0) -> str | None:
    """Why no kernel attends to this layer's blocks as they lie, and what that costs; None: one does."""
    reason = _reason(recipe, geometry, layer)
    return reason and f"{recipe.name}, layer {layer}: {reason}; {COST}"


def _reason(recipe: Recipe, geometry: Geometry, layer: int) -> str | None:
    key, value = recipe.at(layer)
    if not dispatch.available():
        return "triton is not installed (pip install 'kvq-runtime[triton]')"
    if isinstance(recipe.select, Heavy):
        return "it keeps tokens by their attention weights, which the kernel does not hand out"
    if isinstance(recipe.select, Chunks):
        return "it reads the chunks that each query asks for"
    if recipe.online is not None:
        return "each row has a codec of its own"
    if key.window != value.window:
        return "keys and values have different sinks, recent or block"
    for half, side, position in (("keys", key, recipe.position), ("values", value, "post")):
        if dispatch.kernels("layout").layout(side, geometry, position) is None:
            return f"there is no kernel for its {half}"
    if key.predict is not None and recipe.position == "post" and geometry.head_size > MOST:
        return f"heads of more than {MOST} channels leave no registers for the mean of keys after RoPE"
    return None


def _reader(codec: Codec, position: str, device: torch.device) -> Any:
    """How a side's blocks are read; what was fitted for a layer's quantizer is its own."""
    if codec.fitted:
        return _made(codec.side, codec.geometry, position, device, codec.fitted)
    return _shared(codec.side, codec.geometry, position, device)


@lru_cache(maxsize=64)
def _shared(side: Side, geometry: Geometry, position: str, device: torch.device) -> Any:
    """That, with the tables of that on the device; all layers share them."""
    return _made(side, geometry, position, device, {})


def _made(side: Side, geometry: Geometry, position: str, device: torch.device, fitted: Mapping[str, Tensor]) -> Any:
    layout = dispatch.kernels("layout").layout(side, geometry, position, fitted)
    return dispatch.kernels("attention").Encoded.of(layout, torch.empty(0, device=device))


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
        readers = [_reader(codec, position, k_BTC.device) for codec, position in zip(codecs, positions, strict=True)]
        self.shared += [x for reader in readers for x in (reader.lookup, reader.turn) if x is not None]
        readers = [
            replace(reader, mean=codec.tensors.get("predict.mean"))
            for reader, codec in zip(readers, codecs, strict=True)
        ]
        keys, values = (FixedStream(*one, self.max_tokens) for one in zip(codecs, (k_BTC, k_BTC), readers, strict=True))
        return keys, values

    def attend(
        self, history: History, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """As BlockCache.attend, and log2 Σ 2^s of the scores, [B, query heads, T]; None where torch has to answer.

        A mask is taken to be that of the padding announced with this pass; one that was not announced is not the
        kernel's. Nor are padded slots after a row's first real one, or, before RoPE or with a mean, keys that do not
        turn whole, or not by their place after the padding. More rows of queries than its tile has attend slab by slab
        (tall.py).
        """
        (keys, values), (batch, heads, count, _) = history.layers[layer], q_BHTD.shape
        if not (isinstance(keys, FixedStream) and isinstance(values, FixedStream)) or not batch * count:
            return None
        if mask is not None and not self.timeline.told:
            return None
        self.look(batch, count, q_BHTD.device)
        if not self._real:
            return None
        attention, launch, held = dispatch.kernels("attention"), dispatch.kernels("launch"), self.geometry.kv_heads
        if not launch.at_once(keys.read.layout, values.read.layout, heads // held, count):
            if self.timeline.recorded:
                raise RuntimeError("a step of so many query heads per KV head is no graph: it decodes slab by slab")
            return tall.attend(history, layer, q_BHTD, self._starts_B, scale)
        if not self.regular:
            return None
        for stream in (keys, values):
            stream.publish()
        exact = attention.Exact(keys._buffer, values._buffer, keys.kept_BSC, values.kept_BSC)
        splits = launch.splits(batch * held, self.max_tokens // keys.side.block, q_BHTD.device)
        turns = self._tables(keys) if self.recipe.position == "pre" or keys.read.mean is not None else None
        return attention.attend(
            q_BHTD, keys.read, values.read, exact, keys.counts, self._starts_B, scale, splits, turns
        )

    @property
    def regular(self) -> bool:
        """Whether padding is on the left, and what the kernel turns, turns whole and by its place after it."""
        if "positions" not in self.recipe.needs:  # keys after RoPE, without a mean
            return self._real
        return self._real and self._counted and 2 * self.timeline.half == self.geometry.head_size

    def look(self, batch: int, count: int, device: torch.device) -> None:
        """Find each row's first real slot, int32 [B]: once in a pass, and not while steps say nothing of padding."""
        length, last = self.timeline.length, self._length
        self._length = length
        if length == last or (length == last + 1 and count == 1 and not self.timeline.told):
            return
        starts_B, self._real, self._counted = self.timeline.starts(batch, device)
        if len(self._starts_B) != batch:
            self._starts_B, self._turns = starts_B, None
        self._starts_B.copy_(starts_B)
        if self._turns is not None:
            attention, turns = dispatch.kernels("attention"), self._turns
            turns.leads_B2K.copy_(attention.leads(starts_B, turns.speed_K, turns.scaling))

    def _tables(self, keys: FixedStream) -> Any:
        """What follows positions, for as many blocks as the table has room for."""
        blocks, rotary = len(keys.table) * SLAB + 1, self.timeline.require()
        if self._turns is None or len(self._turns.bases_N2K) < blocks:
            frequencies_K = rotary.frequencies_K.to(keys.table.device)
            self._turns = dispatch.kernels("attention").Turns.of(
                frequencies_K, rotary.scaling, keys.side.block, blocks, self._starts_B, self.recipe.position
            )
        return self._turns

    @property
    def tensors(self) -> list[Tensor]:
        """What is held beside the streams."""
        return [self._starts_B, *(() if self._turns is None else self._turns[:5])]
