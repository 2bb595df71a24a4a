"""Hold a model's compressed cache: exact sinks, encoded blocks, an exact window, in every layer.

Layers are updated in order, once per forward pass. A recipe that predicts reads each layer's history through the
decoded history of the layer below; what is decoded is carried upward for the length of one forward pass and then
dropped. Read out of order, it is decoded again from the nearest layer that needs nothing below.

Knows nothing of transformers: see `hf.py`. Tensors are [B, T, C], all heads side by side.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kvq_runtime import codec as codecs
from kvq_runtime import rope
from kvq_runtime.codec import Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.memory import MemoryReport
from kvq_runtime.recipe import Half, Recipe
from kvq_runtime.stream import Stream
from kvq_runtime.timeline import Timeline

Pair = tuple[Tensor, Tensor]


class BlockCache:
    """The compressed cache of `geometry` under `recipe`, with an artifact's tensors where the recipe is fitted.

    `held` are the layers it holds, if not all. An error undoes the forward pass it comes from; nothing else changes.
    `reencoded` counts tokens that were decoded and will be encoded again: only a crop below the window does that.
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        held: Iterable[int] | None = None,
    ):
        self.recipe = recipe.check(geometry)
        if recipe.fitted and not tensors:
            raise ValueError(
                f"recipe {recipe.name} has fitted stages: load an artifact with from_pretrained, "
                f"or make one with kvq-calibrate --recipe {recipe.name}"
            )
        self.geometry = geometry
        self.held = frozenset(range(geometry.layers) if held is None else held)
        self.codecs = codecs.build(recipe, geometry, tensors or {})
        # by layer, how many layers underneath its predictions read
        self._reads = [max(max(codec.below, default=0) for codec in pair) for pair in self.codecs]
        self._depth = max(self._reads)
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self.timeline = Timeline()
        self.layers: dict[int, tuple[Stream, Stream]] = {}
        self.reencoded = 0
        self._before = 0  # tokens before this forward pass
        self.scratch_peak = 0
        self._carried: dict[tuple[int, int], Pair] = {}
        self._fresh: dict[tuple[int, int], Pair] = {}
        self._rooms: dict[Half, Tensor] = {}

    # ---- one layer of one forward pass -------------------------------------------------------------------------

    def update(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> Pair:
        """Take in a layer's new keys (after RoPE) and values; return all of them, history decoded, as 16-bit would.

        What is returned is valid until the next layer's update, which decodes into the same memory.
        The first call returns its arguments: a prompt attends to exact keys and values. A flush follows the reading,
        so a step attends to the state before its own flush.
        """
        try:
            return self._update(layer, k_BTC, v_BTC)
        except Exception:
            self.crop(self._before)
            raise

    def _update(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> Pair:
        streams = self._arrive(layer, k_BTC)
        out = (k_BTC, v_BTC) if streams[0].length == 0 else self._read(layer, (k_BTC, v_BTC))
        for stream, x_BTC in zip(streams, (k_BTC, v_BTC), strict=True):
            if not x_BTC.is_cuda:
                self._refuse_nan(layer, stream, x_BTC, stream.length)
            stream.append(x_BTC)
            self._keep_sinks(stream, x_BTC)
        self._flush(layer)
        for stream in streams:
            stream.trim()
        self._forget(layer)
        return out

    def _streams(self, layer: int, k_BTC: Tensor) -> tuple[Stream, Stream]:
        if layer not in self.layers:
            if layer not in self.held:
                raise ValueError(f"layer {layer}; the cache was made for {sorted(self.held)}")
            if k_BTC.shape[-1] != self.geometry.width:
                raise ValueError(f"keys of width {k_BTC.shape[-1]}; the cache was made for {self.geometry}")
            for codec in self.codecs[layer]:
                codec.to(k_BTC.device)
            one, two = (Stream(c, len(k_BTC), k_BTC.dtype, k_BTC.device) for c in self.codecs[layer])
            self.layers[layer] = (one, two)
        rows = len(self.layers[layer][0].sinks_BSC)
        if len(k_BTC) != rows:
            raise ValueError(f"{len(k_BTC)} rows; the cache holds {rows}: reset() it, or make one for each batch")
        return self.layers[layer]

    def _arrive(self, layer: int, k_BTC: Tensor) -> tuple[Stream, Stream]:
        """Extend the timeline with the first layer of a forward pass; a pass that stopped midway is undone first."""
        batch, count, _ = k_BTC.shape
        before = self.layers[layer][0].length if layer in self.layers else 0
        first = before + count != self.timeline.length
        if first:
            self.settle()
            self._carried.clear()
            self._fresh.clear()
            self._before = self.timeline.length
        streams = self._streams(layer, k_BTC)
        if first:
            self.timeline.extend(batch, count, k_BTC.device)
            if "positions" in self.recipe.needs:
                self.timeline.require()
        below = self.layers.get(layer - 1)
        if self.recipe.chained and layer > 0 and (below is None or below[0].length != self.timeline.length):
            raise RuntimeError(f"layer {layer} is predicted from layer {layer - 1}, which must be updated before it")
        return streams

    def settle(self) -> None:
        """Undo a forward pass that stopped midway: truncate every layer to the shortest."""
        shortest = self.length
        if any(s.length != shortest for pair in self.layers.values() for s in pair) or self.timeline.length != shortest:
            self.crop(shortest)

    def _keep_sinks(self, stream: Stream, x_BTC: Tensor) -> None:
        sinks = stream.side.sinks
        if sinks == 0:
            return
        first = stream.length - x_BTC.shape[1]
        if self.timeline.real_BT is None and first >= sinks:
            return
        slots, arrived = self.timeline.sink_slots(sinks, len(x_BTC), x_BTC.device)
        here = arrived & (slots >= first) & (slots < stream.length)
        if bool(here.any()):
            rows, ranks = here.nonzero(as_tuple=True)
            stream.sinks_BSC[rows, ranks] = x_BTC[rows, slots[rows, ranks] - first]

    def _put_sinks(self, stream: Stream, out_BTC: Tensor, start: int = 0) -> None:
        sinks = stream.side.sinks
        if sinks == 0:
            return
        if self.timeline.real_BT is None:
            stop = min(sinks, start + out_BTC.shape[1])
            out_BTC[:, : max(0, stop - start)] = stream.sinks_BSC[:, start:stop]
            return
        slots, arrived = self.timeline.sink_slots(sinks, len(out_BTC), out_BTC.device)
        rows, ranks = (arrived & (slots >= start) & (slots < start + out_BTC.shape[1])).nonzero(as_tuple=True)
        out_BTC[rows, slots[rows, ranks] - start] = stream.sinks_BSC[rows, ranks]

    # ---- reading -----------------------------------------------------------------------------------------------

    def _read(self, layer: int, new: Pair) -> Pair:
        """History decoded, window and new tokens in one tensor each, in the dtype of the new ones."""
        streams, out = self.layers[layer], []
        for stream, x_BTC in zip(streams, new, strict=True):
            whole = self._room(stream.codec.half, x_BTC, stream.length + x_BTC.shape[1])
            whole[:, stream.encoded : stream.length] = stream.window_BTC
            whole[:, stream.length :] = x_BTC
            out.append(whole)
        if self.recipe.chained:
            for run in streams[0].runs():
                for stream, decoded, whole in zip(streams, self._history(layer, run), out, strict=True):
                    self._restore(stream, decoded, run, whole[:, slice(*stream.tokens(run))])
        else:
            for stream, whole in zip(streams, out, strict=True):
                for run in stream.runs():
                    room = whole[:, slice(*stream.tokens(run))]
                    self._restore(stream, self._decode(stream, run, room), run, room)
        for stream, whole in zip(streams, out, strict=True):
            if stream.encoded:
                self._put_sinks(stream, whole[:, : stream.encoded])
        carried = [*out, *(tensor for pair in self._carried.values() for tensor in pair)]
        self.scratch_peak = max(self.scratch_peak, sum(t.numel() * t.element_size() for t in carried))
        return out[0], out[1]

    def _room(self, half: Half, x_BTC: Tensor, length: int) -> Tensor:
        """Where keys, or values, of a layer are put together; every layer of a forward pass uses the same memory."""
        shape = (len(x_BTC), length, x_BTC.shape[2])
        if half not in self._rooms or self._rooms[half].shape != shape:
            self._rooms[half] = x_BTC.new_empty(shape)
        return self._rooms[half]

    def _restore(self, stream: Stream, x_NTC: Tensor, run: tuple[int, int], out_BTC: Tensor) -> None:
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

    def _decode(self, stream: Stream, run: tuple[int, int], room_BTC: Tensor | None = None) -> Tensor:
        """Decode blocks of a stream that is not predicted, into `room` where a single row can lie there as it is."""
        fields = {name: field.flatten(0, 1) for name, field in stream.fields(*run).items()}
        if room_BTC is None or len(room_BTC) != 1 or room_BTC.dtype != torch.float32:
            return stream.codec.decode(fields, Context())
        return stream.codec.decode(fields, Context(), room_BTC[0].unflatten(0, (-1, stream.side.block)))

    def _history(self, layer: int, run: tuple[int, int]) -> Pair:
        """The decoded, centred blocks of a run in this layer, [B·n, block, C] each; carried for the layers above."""
        first, stop = run
        if (layer, first) in self._carried:
            pair = self._carried[layer, first]
            count = stop - first
            if len(pair[0]) == count * len(self.layers[layer][0].sinks_BSC):
                return pair
        below = [self._history(layer - d, run) for d in range(1, self._reads[layer] + 1)]
        keys, values = self.layers[layer]
        parts = [{n: f.flatten(0, 1) for n, f in stream.fields(first, stop).items()} for stream in (keys, values)]
        decoded = keys.codec.decode(parts[0], Context(below=below))
        pair = (decoded, values.codec.decode(parts[1], Context(below=below, keys=decoded)))
        self._carried[layer, first] = (pair[0].to(torch.bfloat16), pair[1].to(torch.bfloat16))
        return pair

    def _forget(self, layer: int) -> None:
        """Drop what no layer above will read in this forward pass; after the last, also what would undo it."""
        last = layer == max(self.held)
        if last:
            for stream in (stream for pair in self.layers.values() for stream in pair):
                stream.release()
            self.timeline.release()
            self._rooms.clear()
        for carried in (self._carried, self._fresh):
            for key in [key for key in carried if last or key[0] <= layer - self._depth]:
                del carried[key]

    # ---- encoding ----------------------------------------------------------------------------------------------

    def _refuse_nan(self, layer: int, stream: Stream, x_BTC: Tensor, start: int) -> None:
        """Raise if a real token, from slot `start` on, holds a NaN or an infinity."""
        if math.isfinite(float(x_BTC.sum())):
            return
        bad_BT = ~torch.isfinite(x_BTC).all(-1)
        if self.timeline.real_BT is not None:
            bad_BT &= self.timeline.real_BT[:, start : start + x_BTC.shape[1]]
        if bool(bad_BT.any()):
            token = start + int(bad_BT.any(0).int().argmax())
            raise ValueError(
                f"layer {layer}, block {token // stream.side.block}: NaN or infinity in the model's "
                f"{stream.codec.half}s at token {token}; the cache keeps the tokens before this forward pass"
            )

    def _flush(self, layer: int) -> None:
        keys, values = self.layers[layer]
        for stream in (keys, values):
            if stream.due:
                stream.keep(self._before)
            if stream.due and stream.sinks_BSC.is_cuda:  # here, where the device is waited for anyway
                self._refuse_nan(layer, stream, stream.window_BTC[:, : stream.due * stream.side.block], stream.encoded)
        if self.recipe.chained:
            while keys.due:
                self._encode_chained(layer)
            return
        for stream in (keys, values):
            while stream.due:
                block = stream.blocks
                x_BTC, context = self._block_input(stream, block)
                stream.store(stream.codec.encode(x_BTC, context))

    def _encode_chained(self, layer: int) -> None:
        """Encode the oldest block of keys, then of values, from the decoded block of the layers below."""
        keys, values = self.layers[layer]
        block = keys.blocks
        below = [self._block(layer - d, block) for d in range(1, self._reads[layer] + 1)]
        k_BTC, context = self._block_input(keys, block)
        v_BTC, _ = self._block_input(values, block)
        k_fields = keys.codec.encode(k_BTC, Context(context.rope, None, below))
        decoded = keys.codec.decode(k_fields, Context(below=below))
        v_fields = values.codec.encode(v_BTC, Context(keys=decoded, below=below))
        if layer + 1 < self.geometry.layers:
            self._fresh[layer, block] = (decoded, values.codec.decode(v_fields, Context(keys=decoded, below=below)))
        keys.store(k_fields)
        values.store(v_fields)

    def _block(self, layer: int, block: int) -> Pair:
        """One decoded block of a layer: at hand from this forward pass, or decoded again."""
        if (layer, block) not in self._fresh:
            self._fresh[layer, block] = self._history_of_block(layer, block)
        return self._fresh[layer, block]

    def _history_of_block(self, layer: int, block: int) -> Pair:
        below = [self._block(layer - d, block) for d in range(1, self._reads[layer] + 1)]
        keys, values = self.layers[layer]
        parts = [{n: f[:, 0] for n, f in stream.fields(block, block + 1).items()} for stream in (keys, values)]
        decoded = keys.codec.decode(parts[0], Context(below=below))
        return decoded, values.codec.decode(parts[1], Context(below=below, keys=decoded))

    def _block_input(self, stream: Stream, block: int) -> tuple[Tensor, Context]:
        """The window's oldest block as the codec wants it: sinks and padding filled, RoPE undone where it must be."""
        size, start = stream.side.block, block * stream.side.block
        x_BTC = stream.window_BTC[:, :size]
        half = stream.codec.half
        source = self.timeline.source(start, start + size, stream.side.sinks)
        if source is not None:
            source = source.to(x_BTC.device)
            taken = source.clamp(min=0)[..., None].expand(len(x_BTC), -1, x_BTC.shape[-1])
            x_BTC = x_BTC.gather(1, taken).where((source >= 0)[..., None], 0.0)
        if half == "value" or "positions" not in self.recipe.needs:
            return x_BTC, Context()
        cos, sin = self.timeline.rope(start, start + size)
        if source is not None:
            turned = source.clamp(min=0)[..., None]
            cos, sin = (t.expand(len(source), -1, -1).gather(1, turned.expand(-1, -1, t.shape[-1])) for t in (cos, sin))
            cos, sin = (t.where((source >= 0)[..., None], one) for t, one in ((cos, 1.0), (sin, 0.0)))
        if self.recipe.position == "pre":
            exact = x_BTC.dtype
            x_BTC = rope.unrotate(x_BTC.unflatten(-1, (self.geometry.kv_heads, -1)), cos, sin).flatten(-2)
            x_BTC = x_BTC.to(exact) if stream.codec.side.quantize.kind == "exact" else x_BTC
        return x_BTC, Context(rope=(cos.expand(len(x_BTC), -1, -1), sin.expand(len(x_BTC), -1, -1)))

    # ---- the whole cache ---------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        if len(self.layers) < len(self.held):
            return 0
        return min((stream.length for pair in self.layers.values() for stream in pair), default=0)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. The survivors of a block that is cut return to the window, decoded."""
        self._carried.clear()
        self._fresh.clear()
        again = 0
        length = min(length, self.length)
        for layer in sorted(self.layers, reverse=True):
            cut = {}
            for half, stream in enumerate(self.layers[layer]):
                block, rest = divmod(length, stream.side.block)
                if length < stream.encoded and rest and not stream.keeps(length):
                    start = block * stream.side.block
                    run = (block, block + 1)
                    decoded = self._block(layer, block)[half] if self.recipe.chained else self._decode(stream, run)
                    tokens = stream.window_BTC.new_empty(len(stream.sinks_BSC), stream.side.block, self.geometry.width)
                    self._restore(stream, decoded, run, tokens)
                    self._put_sinks(stream, tokens, start)
                    cut[half] = tokens[:, :rest]
                    again = max(again, rest)
            for half, stream in enumerate(self.layers[layer]):
                stream.crop(length, cut.get(half))
        self.reencoded += again
        self._fresh.clear()
        self.timeline.crop(length)
        if length == 0:
            self.layers.clear()

    def select(self, rows: Tensor) -> None:
        """Keep these rows of every tensor that has rows, in this order: beam search, batch changes."""
        self._carried.clear()
        self._fresh.clear()
        self.timeline.select(rows)
        for pair in self.layers.values():
            for stream in pair:
                stream.select(rows.to(stream.sinks_BSC.device))

    def memory_report(self) -> MemoryReport:
        """Bytes held, by kind, and what 16 bits would hold."""
        return MemoryReport.of(self)
