"""Encode the oldest tokens of a layer's window, one whole block at a time, when they are due."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import ROLES, SLAB
from kvq_runtime.store.block_errors import BlockErrors, relative_key_error
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore, Run
from kvq_runtime.store.storage import Slab


class Encoder:
    """Turns the oldest blocks of windows into encoded ones.

    errors     of the blocks, counted; None: they are not measured
    encoding   hears of a layer's oldest blocks, so many, before they are encoded
    together   predicted blocks that share matrix products: 1, so that a block does not depend on its company, but for a
               cache of one pass that is not kept, which takes a third of the time with whole slabs
    """

    together = 1
    encoding: Callable[[LayerStore, int], None]

    def __init__(self, decoder: Decoder, errors: BlockErrors | None = None):
        self.decoder, self.stores = decoder, decoder.stores
        self.recipe, self.positions = decoder.recipe, decoder.positions
        self.errors = errors
        self.first_errors: dict[int, Tensor] = {}  # by layer, `relative_key_error` of the keys of its first blocks
        self._watched: list[tuple[Tensor, str]] = []  # largest |number|s, and the error where one is not finite

    def flush(self, layer: int) -> None:
        """Encode every block of a layer that is due."""
        store = self.stores[layer]
        if not store.due:
            return
        self.watch(layer, store.window_2BTC[:, :, : store.due * store.window.block], store.encoded)
        self.encode(layer, store.due)

    def encode(self, layer: int, count: int) -> None:
        """Encode the `count` oldest blocks in the window of a layer."""
        store, target = self.stores[layer], self.stores[layer].blocks + count
        together = self.together if self.recipe.cross_layer else 1
        if not self.recipe.cross_layer and not self.recipe.policies:
            # a launch encodes each block as it would alone; a matrix product might round them differently
            together = SLAB if all(codec.one_launch(store.buffer_2BTC) for codec in store.codecs) else 1
        self.encoding(store, count)
        side_by_side = self.recipe.cross_layer or all(
            isinstance(codec, Codec) and codec.rounds_together for codec in store.codecs
        )
        while store.blocks < target:
            most = SLAB if side_by_side else together
            some = min(most, target - store.blocks, SLAB - store.blocks % SLAB)
            keys, values = self._encoded(store, _runs(store.blocks, store.blocks + some, together))
            self._watch_scales(layer, store.blocks, (keys, values))
            store.add_blocks(some, keys, values)

    def watch(self, layer: int, x_2BTC: Tensor, start: int) -> None:
        """Have `refuse_nan` look for NaN and infinity in these tokens, from slot `start` on; waits for nothing."""
        peak_2BT = torch.linalg.vector_norm(x_2BTC, torch.inf, -1)  # NaN where there is one
        if self.positions.real_BT is not None:
            real_BT = self.positions.real_BT[:, start : start + x_2BTC.shape[2]]
            peak_2BT = peak_2BT.where(real_BT, 0)
        for role, peak_BT in zip(ROLES, peak_2BT, strict=True):
            where = f"layer {layer}, from token {start + self.positions.dropped} on"
            self._watched.append((peak_BT.amax(), f"{where}: NaN or infinity in the model's {role}s"))

    def _watch_scales(self, layer: int, block: int, slabs: Sequence[Slab]) -> None:
        """Have `refuse_nan` look for scales of these blocks that float16 does not hold; waits for nothing."""
        for role, fields in zip(ROLES, slabs, strict=True):
            for field in fields.values():
                if field.dtype == torch.float16 and field.numel():  # where all channels have 0 bits there are no scales
                    why = f"too large for the scales of {self.recipe.name}, which are float16, up to 65504"
                    where = f"layer {layer}, from block {block} on: the model's {role}s are {why}: use the recipe exact"
                    self._watched.append((torch.linalg.vector_norm(field, torch.inf), where))

    def forget(self) -> None:
        """Watch nothing any more: the pass is undone."""
        self._watched.clear()
        self.first_errors.clear()

    def refuse_nan(self) -> None:
        """Raise a ValueError if a real token that was watched holds a NaN or an infinity, or what is stored of a block
        does: its keys, or values, are too large for scales in float16.

        Waits for the device, once for all layers; not where nothing was watched.
        """
        watched, self._watched = self._watched, []
        if not watched:
            return
        finite = torch.stack([peak.float() for peak, _ in watched]).isfinite()
        if not bool(finite.all()):
            _, why = watched[finite.tolist().index(False)]
            raise ValueError(f"{why}; the cache keeps the tokens before this forward pass")

    def _encoded(self, store: LayerStore, runs: Sequence[Run]) -> tuple[Slab, Slab]:
        """Return the fields of the window's oldest blocks of keys and of values, [B, blocks, ...] each.

        runs   the blocks, those of a run in the same matrix products
        """
        predicted = self.recipe.cross_layer
        below = [self.decoder.below(store.layer, run) if predicted else () for run in runs]
        read_above = runs[0][1] - runs[0][0] > 1 or store.layer + 1 < self.decoder.geometry.layers
        slabs, decoded = list[Slab](), list[list[Tensor]]()
        for role, codec in enumerate(store.codecs):
            inputs = [self._inputs(store, role, run) for run in runs]
            if predicted:
                assert isinstance(codec, Codec), "nothing fitted to a prompt is predicted"
                keys = decoded[0] if role else [None] * len(runs)
                triples = zip(inputs, keys, below, strict=True)
                encoded = codec.encode_each(
                    [(x, Context(of.rope, of_keys, under)) for (x, of), of_keys, under in triples]
                )
            elif isinstance(codec, Codec):
                encoded = codec.encode_each(inputs)
            else:
                encoded = [(codec.encode(x_NTC, context), context) for x_NTC, context in inputs]
            if self.errors is not None or (predicted and (role == 0 or read_above)):
                alone = not isinstance(codec, Codec)
                decoded.append([codec.decode(*each) for each in encoded] if alone else codec.decode_each(encoded))
            if self.errors is not None:
                for run, (x_NTC, _), (_, context), back in zip(runs, inputs, encoded, decoded[role], strict=True):
                    counted_NT = self._counted(store, run, x_NTC.device)
                    self.errors.add(store.layer, role, _gap(store.codecs[role], x_NTC, context, back), counted_NT)
            if role == 0 and runs[0][0] == 0:
                (x_NTC, _), (fields, context) = inputs[0], encoded[0]
                back = decoded[0][0] if decoded else codec.decode(fields, context)
                gap_NTC = _gap(codec, x_NTC, context, back)
                counted_NT = self._counted(store, runs[0], x_NTC.device)
                heads = self.decoder.geometry.kv_heads
                self.first_errors[store.layer] = relative_key_error(gap_NTC, x_NTC, heads, counted_NT)
            slabs.append(_side_by_side(runs, [fields for fields, _ in encoded], store.rows))
        if predicted and len(decoded) == 2:
            for run, *pair in zip(runs, *decoded, strict=True):
                self.decoder.add(store.layer, run, (pair[0], pair[1]))
        return slabs[0], slabs[1]

    def _counted(self, store: LayerStore, run: Run, device: torch.device) -> Tensor | None:
        """Mark the tokens of blocks that are neither padding nor sinks, [B · count, block]; None: all."""
        block, sinks, (first, stop) = store.window.block, store.window.sinks, run
        if self.positions.real_BT is None and first * block >= sinks:
            return None
        counted = self.positions.valid(first * block, stop * block, sinks).to(device)
        return counted.expand(store.rows, -1).unflatten(1, (stop - first, block)).flatten(0, 1)

    def _inputs(self, store: LayerStore, role: int, run: Run) -> tuple[Tensor, Context]:
        """Return blocks of the window as their codec wants them, those of a row side by side: [B · count, block, C].

        Blocks in which every slot holds a token of its own are prepared together, from the first after which all do.
        """
        size, stop, inputs = store.window.block, run[1], []
        for block in range(*run):
            if self.positions.source(block * size, stop * size, store.window.sinks) is None:
                inputs.append(self._input(store, role, block, stop - block))
                break
            inputs.append(self._input(store, role, block, 1))
        if len(inputs) == 1:
            x_BnTC, rope = inputs[0]
        else:
            x_BnTC = torch.cat([x_BnTC for x_BnTC, _ in inputs], 1)
            ropes = [rope for _, rope in inputs if rope is not None]
            rope = tuple(torch.cat(part, 1) for part in zip(*ropes, strict=True)) if ropes else None
        if rope is None:
            return x_BnTC.flatten(0, 1), Context()
        return x_BnTC.flatten(0, 1), Context(rope=(rope[0].flatten(0, 1), rope[1].flatten(0, 1)))

    def _input(self, store: LayerStore, role: int, block: int, count: int) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Blocks of the window as their codec wants them, [B, count, block, C], and cos and sin, where it wants them.

        count   more than one where every slot holds a token of its own
        """
        size = store.window.block
        start, length, ahead = block * size, count * size, (block - store.blocks) * size
        # A copy, because `exact` keeps it, and the window's place is the sinks' next. What is not finite is refused
        # when the pass has ended, or padding: until then, no index is made of it.
        x_BTC = torch.nan_to_num(store.window_2BTC[role, :, ahead : ahead + length], 0.0, 0.0, 0.0)
        source = self.positions.source(start, start + length, store.window.sinks)
        if ROLES[role] == "value" or "positions" not in self.recipe.needs:
            return block_input(x_BTC, source)[0].unflatten(1, (count, size)), None
        codec = store.codecs[role]
        undo = "undo" if codec.unrotated else None
        tables, heads = self.positions.rope(start, start + length), self.decoder.geometry.kv_heads
        k_BTC, rope = block_input(x_BTC, source, tables, undo, heads, codec.segment)
        keeps = codec.scheme.quantize.keeps_dtype
        k_BTC = k_BTC.to(x_BTC.dtype) if keeps else k_BTC
        assert rope is not None, "tables were given"
        return k_BTC.unflatten(1, (count, size)), tuple(part.unflatten(1, (count, size)) for part in rope)


def _gap(codec: Any, x_NTC: Tensor, context: Context, decoded_NTC: Tensor) -> Tensor:
    """Return the error of blocks as the codec takes them, which it decodes, centred, to `decoded`."""
    gap_NTC = x_NTC.float() - decoded_NTC.float()
    return gap_NTC if codec.predictor is None else gap_NTC - codec.mean(context)


def _runs(first: int, stop: int, most: int) -> list[Run]:
    """Split blocks from `first` on into runs of at most `most`."""
    return [(start, min(start + most, stop)) for start in range(first, stop, most)]


def _side_by_side(runs: Sequence[Run], fields: Sequence[Slab], rows: int) -> Slab:
    """The fields of runs of blocks, [B · count, ...] each, those of a row one after another: [B, blocks, ...]."""
    sizes = [(rows, stop - start) for start, stop in runs]
    return {
        name: torch.cat([part[name].unflatten(0, size) for part, size in zip(fields, sizes, strict=True)], 1)
        for name in fields[0]
    }
