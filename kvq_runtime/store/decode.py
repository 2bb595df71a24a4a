"""Decode what is encoded, for the length of one forward pass.

A recipe that predicts reads each layer's history through the decoded history of the layers below. What is decoded is
carried upward while the layers are updated in order, and dropped when nothing above will read it; read out of order,
it is decoded again from the nearest layer that needs nothing below.

A *run* is (first, last + 1) of the blocks of one slab. Tensors are [B, T, C] or, as codecs have them, [B·n, block, C].
"""

import torch
from torch import Tensor

from kvq_runtime import rope, sinks
from kvq_runtime.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Half, Recipe
from kvq_runtime.stream import Stream
from kvq_runtime.timeline import Timeline

Pair = tuple[Tensor, Tensor]
Run = tuple[int, int]
Layers = dict[int, tuple[Stream, Stream]]


class History:
    """The decoded history of a cache's layers."""

    def __init__(self, recipe: Recipe, geometry: Geometry, codecs: list[tuple[Codec, Codec]], timeline: Timeline):
        self.recipe, self.geometry, self.codecs, self.timeline = recipe, geometry, codecs, timeline
        self.layers: Layers = {}
        self.scratch_peak = 0
        # by layer, how many layers underneath its predictions read
        self._reads = [max(max(codec.below, default=0) for codec in pair) for pair in codecs]
        self._depth = max(self._reads)
        self._carried: dict[tuple[int, int], Pair] = {}
        self._fresh: dict[tuple[int, int], Pair] = {}
        self._rooms: dict[Half, Tensor] = {}

    def whole(self, layer: int) -> Pair:
        """History decoded and window in one tensor each."""
        streams, out = self.layers[layer], []
        for stream in streams:
            window_BTC = stream.window_BTC
            whole = self._room(stream.codec.half, window_BTC, stream.length)
            whole[:, stream.encoded :] = window_BTC
            out.append(whole)
        if self.recipe.chained:
            for run in streams[0].runs():
                for stream, decoded, whole in zip(streams, self._pair(layer, run), out, strict=True):
                    self._restore(stream, decoded, run, whole[:, slice(*stream.tokens(run))])
        else:
            for stream, whole in zip(streams, out, strict=True):
                for run in stream.runs():
                    room = whole[:, slice(*stream.tokens(run))]
                    self._restore(stream, self._decode(stream, run, room), run, room)
        for stream, whole in zip(streams, out, strict=True):
            if stream.encoded:
                sinks.put(stream, self.timeline, whole[:, : stream.encoded])
        self.count(*out)
        return out[0], out[1]

    def run(self, layer: int, half: int, run: Run) -> Tensor:
        """Keys (half 0), after RoPE, or values (1) of one run of blocks, [B, T, C]; sinks are not put back."""
        stream = self.layers[layer][half]
        start, stop = stream.tokens(run)
        shape = (stream.rows, stop - start, self.geometry.width)
        room = self._room(stream.codec.half, stream.sinks_BSC, shape[1])
        decoded = self._pair(layer, run)[half] if self.recipe.chained else self._decode(stream, run, room)
        self._restore(stream, decoded, run, room)
        self.count(room)
        return room

    def below(self, layer: int, block: int) -> list[Pair]:
        """A block of the layers that this one's predictions read, decoded, nearest first."""
        return [self.block(layer - depth, block) for depth in range(1, self._reads[layer] + 1)]

    def block(self, layer: int, block: int) -> Pair:
        """One decoded block of a layer: at hand from this forward pass, or decoded again."""
        if (layer, block) not in self._fresh:
            below = self.below(layer, block)
            parts = [{n: f[:, 0] for n, f in s.fields(block, block + 1).items()} for s in self.layers[layer]]
            self._fresh[layer, block] = self._decode_pair(layer, parts, below)
        return self._fresh[layer, block]

    def add(self, layer: int, block: int, pair: Pair) -> None:
        """Keep a block that has just been encoded, decoded, for the layers above."""
        self._fresh[layer, block] = pair

    def survivors(self, layer: int, half: int, block: int) -> Tensor:
        """One block as it is read, [B, block, C], sinks put back: what a crop in the middle of it keeps."""
        stream = self.layers[layer][half]
        run = (block, block + 1)
        decoded = self.block(layer, block)[half] if self.recipe.chained else self._decode(stream, run)
        tokens = stream.window_BTC.new_empty(stream.rows, stream.side.block, self.geometry.width)
        self._restore(stream, decoded, run, tokens)
        sinks.put(stream, self.timeline, tokens, block * stream.side.block)
        return tokens

    def crop(self, length: int) -> int:
        """Keep the first `length` slots of every layer; how many tokens went back to the window, decoded."""
        self.clear()
        again = 0
        for layer in sorted(self.layers, reverse=True):
            cut = {}
            for half, stream in enumerate(self.layers[layer]):
                block, rest = divmod(length, stream.side.block)
                if length < stream.encoded and rest and not stream.keeps(length):
                    cut[half] = self.survivors(layer, half, block)[:, :rest]
                    again = max(again, rest)
            for half, stream in enumerate(self.layers[layer]):
                stream.crop(length, cut.get(half))
        self.clear()
        return again

    def forget(self, layer: int, last: bool) -> None:
        """Drop what no layer above this one will read in this forward pass."""
        if last:
            self.clear()
            return
        for kept in (self._carried, self._fresh):
            for key in [key for key in kept if key[0] <= layer - self._depth]:
                del kept[key]

    def clear(self) -> None:
        """Drop everything decoded."""
        self._carried.clear()
        self._fresh.clear()
        self._rooms.clear()

    def _pair(self, layer: int, run: Run) -> Pair:
        """The decoded, centred blocks of a run in this layer, [B·n, block, C] each; carried for the layers above."""
        first, stop = run
        keys, values = self.layers[layer]
        pair = self._carried.get((layer, first))
        if pair is not None and len(pair[0]) == (stop - first) * keys.rows:
            return pair
        below = [self._pair(layer - depth, run) for depth in range(1, self._reads[layer] + 1)]
        parts = [{n: f.flatten(0, 1) for n, f in stream.fields(first, stop).items()} for stream in (keys, values)]
        pair = self._decode_pair(layer, parts, below)
        self._carried[layer, first] = (pair[0].to(torch.bfloat16), pair[1].to(torch.bfloat16))
        return pair

    def _decode_pair(self, layer: int, parts: list[dict[str, Tensor]], below: list[Pair]) -> Pair:
        keys, values = self.layers[layer]
        decoded = keys.codec.decode(parts[0], Context(below=below))
        return decoded, values.codec.decode(parts[1], Context(below=below, keys=decoded))

    def _decode(self, stream: Stream, run: Run, room_BTC: Tensor | None = None) -> Tensor:
        """Decode blocks of a stream that is not predicted, into `room` where a single row can lie there as it is."""
        # a fold's ends of groups lie by group, which costs whole tokens more than to put them side by side first
        fields = {name: field.flatten(0, 1).contiguous() for name, field in stream.fields(*run).items()}
        if room_BTC is None or len(room_BTC) != 1 or room_BTC.dtype != torch.float32:
            return stream.codec.decode(fields, Context())
        return stream.codec.decode(fields, Context(), room_BTC[0].unflatten(0, (-1, stream.side.block)))

    def _restore(self, stream: Stream, x_NTC: Tensor, run: Run, out_BTC: Tensor) -> None:
        """Put back mean and position of decoded, centred blocks [B·n, block, C] into [B, n·block, C]."""
        codec, geometry, (start, stop) = stream.codec, self.geometry, stream.tokens(run)
        is_key = codec.half == "key"
        if x_NTC.data_ptr() != out_BTC.data_ptr():
            out_BTC.copy_(x_NTC.reshape(len(out_BTC), stop - start, geometry.width))
        if codec.predictor is not None:
            turning = is_key and self.recipe.position == "post"
            mean = codec.mean(Context(rope=self.timeline.rope(start, stop) if turning else None))
            out_BTC.add_(mean.to(out_BTC.dtype))
        if is_key and self.recipe.position == "pre":
            tables = self.timeline.spread(start, stop, geometry.kv_heads, geometry.head_size, out_BTC.dtype)
            rope.rotate_rows(out_BTC, *tables, geometry.kv_heads, self.timeline.half)

    def _room(self, half: Half, like: Tensor, length: int) -> Tensor:
        """Where keys, or values, of a layer are put together; every layer of a forward pass uses the same memory."""
        shape = (len(like), length, like.shape[-1])
        if half not in self._rooms or self._rooms[half].shape != shape:
            self._rooms[half] = like.new_empty(shape)
        return self._rooms[half]

    def count(self, *rooms: Tensor) -> None:
        """Note how many bytes of decoded tensors are alive."""
        alive = sum(t.numel() * t.element_size() for t in rooms)
        if self._carried:
            alive += sum(t.numel() * t.element_size() for pair in self._carried.values() for t in pair)
        self.scratch_peak = max(self.scratch_peak, alive)
