"""Encode the oldest tokens of a layer's window, one whole block at a time, when they are due."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import ROLES, SLAB
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore, Slab
from kvq_runtime.store.positions import Positions

# (layer, its store) → what is stored beside the window's oldest block: the same fields for every block of the layer
Extra = Callable[[int, LayerStore], Slab]


class Encoder:
    """Turns the oldest blocks of windows into encoded ones.

    extra   what policies store beside a block
    """

    def __init__(self, recipe: Recipe, positions: Positions, decoder: Decoder, extra: Extra):
        self.recipe, self.positions, self.decoder, self.extra = recipe, positions, decoder, extra
        self.stores = decoder.stores

    def flush(self, layer: int) -> None:
        """Encode every block of a layer that is due."""
        store = self.stores[layer]
        if not store.due:
            return
        if store.buffer_2BTC.is_cuda:  # here, where the device is waited for anyway
            self.refuse_nan(layer, store.window_2BTC[:, :, : store.due * store.window.block], store.encoded)
        self.encode(layer, store.due)

    def encode(self, layer: int, count: int) -> None:
        """Encode so many of the oldest blocks in the window of a layer."""
        store = self.stores[layer]
        if self.recipe.cross_layer:
            for _ in range(count):
                store.add_block(*self._predicted(layer, store), self.extra(layer, store))
            return
        for keys, values in zip(*(self._blocks(store, role, count) for role in range(len(ROLES))), strict=True):
            store.add_block(keys, values, self.extra(layer, store))

    def refuse_nan(self, layer: int, x_2BTC: Tensor, start: int) -> None:
        """Raise a ValueError if a real token, from slot `start` on, holds a NaN or an infinity."""
        for role, x_BTC in zip(ROLES, x_2BTC, strict=True):
            if math.isfinite(x_BTC.sum().item()):
                continue
            bad_BT = ~torch.isfinite(x_BTC).all(-1)
            if self.positions.real_BT is not None:
                bad_BT &= self.positions.real_BT[:, start : start + x_BTC.shape[1]]
            if bool(bad_BT.any()):
                slot = start + int(bad_BT.any(0).int().argmax())
                raise ValueError(
                    f"layer {layer}, block {slot // self.recipe.window.block}: NaN or infinity in the model's {role}s "
                    f"at token {slot + self.positions.dropped}; the cache keeps the tokens before this forward pass"
                )

    def _blocks(self, store: LayerStore, role: int, count: int) -> Iterator[Slab]:
        """The fields of the oldest blocks of keys (0) or values (1), block by block, before each is stored.

        One launch encodes a slab of them, each as it would alone; a matrix product might round them differently.
        """
        codec, first = store.codecs[role], store.blocks
        most = SLAB if codec.one_launch(store.buffer_2BTC) else 1
        for done in range(first, first + count, most):
            some = range(done, min(done + most, first + count))
            inputs = [self._input(store, role, block) for block in some]
            x_NTC, context = inputs[0]
            if len(some) > 1:
                x_NTC = torch.cat([x_BTC for x_BTC, _ in inputs])
                if context.rope is not None:
                    cos, sin = zip(*(context.rope for _, context in inputs), strict=True)  # type: ignore[misc]
                    context = Context(rope=(torch.cat(cos), torch.cat(sin)))
            fields = codec.encode(x_NTC, context)
            for place in range(len(some)):
                yield {name: field.unflatten(0, (len(some), -1))[place] for name, field in fields.items()}

    def _predicted(self, layer: int, store: LayerStore) -> tuple[Slab, Slab]:
        """The oldest block of keys, then of values, from the decoded block of the layers below."""
        block, (keys, values) = store.blocks, store.codecs
        below = self.decoder.below(layer, block)
        k_BTC, context = self._input(store, 0, block)
        v_BTC, _ = self._input(store, 1, block)
        k_fields = keys.encode(k_BTC, Context(context.rope, None, below))
        decoded = keys.decode(k_fields, Context(below=below))
        v_fields = values.encode(v_BTC, Context(keys=decoded, below=below))
        if layer + 1 < self.decoder.geometry.layers:
            v_decoded = values.decode(v_fields, Context(keys=decoded, below=below))
            self.decoder.add(layer, block, (decoded, v_decoded))
        return k_fields, v_fields

    def _input(self, store: LayerStore, role: int, block: int) -> tuple[Tensor, Context]:
        """A block of the window as its codec wants it."""
        size = store.window.block
        start, ahead = block * size, (block - store.blocks) * size
        # cloned, because `exact` keeps it, and the window's place is the sinks' next
        x_BTC = store.window_2BTC[role, :, ahead : ahead + size].clone()
        source = self.positions.source(start, start + size, store.window.sinks)
        if ROLES[role] == "value" or "positions" not in self.recipe.needs:
            return block_input(x_BTC, source)[0], Context()
        undo = "undo" if self.recipe.position == "pre" else None
        tables, heads = self.positions.rope(start, start + size), self.decoder.geometry.kv_heads
        k_BTC, rope = block_input(x_BTC, source, tables, undo, heads)
        keeps = store.codecs[role].scheme.quantize.keeps_dtype
        return k_BTC.to(x_BTC.dtype) if keeps else k_BTC, Context(rope=rope)
