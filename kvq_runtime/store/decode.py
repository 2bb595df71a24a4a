"""Decode encoded blocks, for the length of one forward pass.

A recipe that predicts reads each layer's history through the decoded history of the layers below. What is decoded is
carried upward while the layers are updated in order, and dropped when nothing above will read it; read out of order,
it is decoded again from the nearest layer that needs nothing below.

A *run* is (first, last + 1) of the blocks of one slab. Tensors are [B, T, C] or, as codecs have them, [B·n, block, C].
A role is a number here: keys 0, values 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops import rope
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import LayerStore, Run
from kvq_runtime.store.positions import Positions

Pair = tuple[Tensor, Tensor]


class Decoder:
    """Decodes the layers of a cache.

    stores         by layer
    scratch_peak   most bytes of decoded tensors alive at once so far
    keep           hold decoded history from pass to pass, as large as 16 bit, so that a block is decoded once: for
                   measurements, whose time is what binds
    """

    def __init__(self, recipe: Recipe, geometry: Geometry, codecs: list[tuple[Codec, Codec]], positions: Positions):
        self.recipe, self.geometry, self.positions = recipe, geometry, positions
        self.stores: dict[int, LayerStore] = {}
        self.scratch_peak = 0
        self.keep = False
        self._history: dict[int, Pair] = {}
        # by layer, how many layers underneath its predictions read
        self._reads = [max(*keys.below, *values.below, 0, 0) for keys, values in codecs]
        self._depth = max(self._reads)
        self._carried: dict[tuple[int, int], Pair] = {}
        self._fresh: dict[tuple[int, int], Pair] = {}
        self._rooms: dict[int, Tensor] = {}

    def whole(self, layer: int) -> Pair:
        """Return blocks decoded and window in one tensor each."""
        store, out = self.stores[layer], []
        for role, window_BTC in enumerate(store.window_2BTC):
            whole = self._room(role, window_BTC, store.length)
            whole[:, store.encoded :] = window_BTC
            out.append(whole)
        if self.keep:
            for whole, history_BTC in zip(out, self._decoded_once(layer), strict=True):
                whole[:, : store.encoded] = history_BTC
        else:
            for run in store.runs:
                self._read(layer, run, [whole[:, slice(*store.tokens(run))] for whole in out])
        if store.encoded:
            for role, whole in enumerate(out):
                store.put_sinks(role, whole[:, : store.encoded])
        self.count(*out)
        return out[0], out[1]

    def run(self, layer: int, role: int, run: Run) -> Tensor:
        """Return keys, after RoPE, or values of one run of blocks, [B, T, C]; sinks are not put back."""
        store = self.stores[layer]
        if self.keep:
            return self._decoded_once(layer)[role][:, slice(*store.tokens(run))]
        room = self._room(role, store.buffer_2BTC[role], (run[1] - run[0]) * store.window.block)
        decoded = self._pair(layer, run)[role] if self.recipe.cross_layer else self._decode(store, role, run, room)
        self._restore(store, role, decoded, run, room)
        if self._carried or room.nbytes > self.scratch_peak:
            self.count(room)
        return room

    def below(self, layer: int, run: Run) -> list[Pair]:
        """Return a run of the layers that this one's predictions read, decoded, nearest first."""
        layers = range(layer - 1, layer - 1 - self._reads[layer], -1)
        return [self.block(n, run[0]) if run[1] - run[0] == 1 else self._pair(n, run) for n in layers]

    def block(self, layer: int, block: int) -> Pair:
        """Return one decoded block of a layer: at hand from this forward pass, or decoded again."""
        if (layer, block) not in self._fresh:
            run = block, block + 1
            self._fresh[layer, block] = self._decode_pair(layer, run, self.below(layer, run))
        return self._fresh[layer, block]

    def add(self, layer: int, run: Run, pair: Pair) -> None:
        """Keep blocks that have just been encoded, decoded, for the layers above."""
        first, stop = run
        (self._fresh if stop - first == 1 else self._carried)[layer, first] = pair

    def survivors(self, layer: int, role: int, block: int) -> Tensor:
        """Return one block as it is read, [B, block, C], sinks put back: what a crop in the middle of it keeps."""
        store, run = self.stores[layer], (block, block + 1)
        decoded = self.block(layer, block)[role] if self.recipe.cross_layer else self._decode(store, role, run)
        tokens = store.buffer_2BTC.new_empty(store.rows, store.window.block, self.geometry.width)
        self._restore(store, role, decoded, run, tokens)
        store.put_sinks(role, tokens, block * store.window.block)
        return tokens

    def crop(self, length: int) -> int:
        """Keep the first `length` slots of every layer; how many tokens went back to the window, decoded."""
        self.restart()
        again = 0
        for layer in sorted(self.stores, reverse=True):
            store, cut = self.stores[layer], None
            block, rest = divmod(length, store.window.block)
            if length < store.encoded and rest:
                cut = torch.stack([self.survivors(layer, role, block)[:, :rest] for role in (0, 1)])
                again = rest
            store.crop(length, cut)
        self.clear()
        return again

    def forget(self, layer: int) -> None:
        """Drop what no layer above this one will read in this forward pass."""
        for kept in (self._carried, self._fresh):
            for key in [key for key in kept if key[0] <= layer - self._depth]:
                del kept[key]

    def restart(self) -> None:
        """Drop everything decoded, that of earlier passes too: slots or rows are others now."""
        self.clear()
        self._history.clear()

    def clear(self) -> None:
        """Drop what was decoded in this forward pass."""
        self._carried.clear()
        self._fresh.clear()
        self._rooms.clear()

    def _read(self, layer: int, run: Run, outs: Sequence[Tensor]) -> None:
        """Decode a run of blocks into keys and values as they are read, [B, T, C] each; sinks are not put back."""
        store, decoded = self.stores[layer], self._pair(layer, run) if self.recipe.cross_layer else None
        for role, out_BTC in enumerate(outs):
            x_NTC = self._decode(store, role, run, out_BTC) if decoded is None else decoded[role]
            self._restore(store, role, x_NTC, run, out_BTC)

    def _decoded_once(self, layer: int) -> Pair:
        """Return all decoded blocks of a layer, [B, encoded, C] each, sinks not put back; only new ones are decoded."""
        store, block = self.stores[layer], self.stores[layer].window.block
        keys_BTC, values_BTC = self._history.get(layer, (store.window_2BTC[0, :, :0], store.window_2BTC[1, :, :0]))
        for first, stop in store.runs:
            run = max(first, keys_BTC.shape[1] // block), stop
            if run[0] < stop:
                new_2BTC = keys_BTC.new_empty(2, store.rows, (stop - run[0]) * block, self.geometry.width)
                self._read(layer, run, list(new_2BTC))
                keys_BTC, values_BTC = (
                    torch.cat(parts, 1) for parts in zip((keys_BTC, values_BTC), new_2BTC, strict=True)
                )
        self._history[layer] = keys_BTC, values_BTC
        return keys_BTC[:, : store.encoded], values_BTC[:, : store.encoded]

    def _pair(self, layer: int, run: Run) -> Pair:
        """The decoded, centred blocks of a run in this layer, [B·n, block, C] each; carried for the layers above."""
        first, stop = run
        pair = self._carried.get((layer, first))
        if pair is not None and len(pair[0]) == (stop - first) * self.stores[layer].rows:
            return pair
        below = [self._pair(layer - depth, run) for depth in range(1, self._reads[layer] + 1)]
        pair = self._decode_pair(layer, run, below)
        self._carried[layer, first] = (pair[0].to(torch.bfloat16), pair[1].to(torch.bfloat16))
        return pair

    def _decode_pair(self, layer: int, run: Run, below: list[Pair]) -> Pair:
        store = self.stores[layer]
        parts = [{n: f.flatten(0, 1) for n, f in store.fields(role, *run).items()} for role in (0, 1)]
        keys, values = store.codecs
        decoded = keys.decode(parts[0], Context(below=below))
        return decoded, values.decode(parts[1], Context(below=below, keys=decoded))

    def _decode(self, store: LayerStore, role: int, run: Run, room_BTC: Tensor | None = None) -> Tensor:
        """Decode blocks that are not predicted, into `room` where a single row can lie there as it is."""
        # stored for a packed reader, the ends of groups lie by group: putting them side by side first is cheaper
        fields = store.fields(role, *run)
        for name, field in fields.items():
            fields[name] = field.flatten(0, 1).contiguous()
        if room_BTC is None or len(room_BTC) != 1 or room_BTC.dtype != torch.float32:
            return store.codecs[role].decode(fields, Context())
        return store.codecs[role].decode(fields, Context(), room_BTC[0].unflatten(0, (-1, store.window.block)))

    def _restore(self, store: LayerStore, role: int, x_NTC: Tensor, run: Run, out_BTC: Tensor) -> None:
        """Put back mean and position of decoded, centred blocks [B·n, block, C] into [B, n·block, C]."""
        codec, is_key, size = store.codecs[role], ROLES[role] == "key", store.window.block
        slots = run[0] * size, run[1] * size
        if x_NTC.data_ptr() != out_BTC.data_ptr():
            out_BTC.copy_(x_NTC.reshape(out_BTC.shape))
        if codec.predictor is not None:
            turning = is_key and self.recipe.position != "pre"
            angles = self.positions.rope(*slots, codec.segment) if turning else None
            mean = codec.mean(Context(rope=angles))
            out_BTC.add_(mean.to(out_BTC.dtype))
        if is_key and codec.unrotated:
            heads = self.geometry.kv_heads
            factors = (heads, self.geometry.head_size, out_BTC.dtype, codec.segment)
            tables = self.positions.spread(*slots, *factors)
            rope.rotate_rows(out_BTC, *tables, heads, self.positions.rotary_pairs)

    def _room(self, role: int, like: Tensor, length: int) -> Tensor:
        """Return memory to put a layer's keys, or values, together in; every layer of a forward pass uses the same."""
        shape = (len(like), length, like.shape[-1])
        if role not in self._rooms or self._rooms[role].shape != shape:
            self._rooms[role] = like.new_empty(shape)
        return self._rooms[role]

    def count(self, *rooms: Tensor) -> None:
        """Note how many bytes of decoded tensors are alive."""
        alive = sum(t.numel() * t.element_size() for t in rooms)
        if self._carried:
            alive += sum(t.numel() * t.element_size() for pair in self._carried.values() for t in pair)
        self.scratch_peak = max(self.scratch_peak, alive)
