"""Encode blocks of tokens of all layers wherever they stand in a text, and decode consecutive blocks.

A `BlockCache` without a window does the work, so the bytes are those of a cache of the same keys and values. A block
needs nothing of the blocks before it.

Shapes: T tokens of blocks · C all heads of a token · S sinks among the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.shared import Fitted
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix.block_file import Block
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.storage import Slab

LayerRows = Mapping[int, tuple[Tensor, Tensor]]  # by layer, keys (after RoPE) and values [T, C]


class BlockCodec:
    """A recipe's codecs for tokens at positions that count from 0.

    rotary   the model's rotation, where the recipe needs positions
    """

    def __init__(self, recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor], rotary: Rotary | None = None):
        self.recipe, self.geometry, self.rotary = recipe.check(geometry), geometry, rotary
        self.tensors = tensors if isinstance(tensors, Fitted) else Fitted(tensors)  # so that caches share the codecs

    def encode(self, first: int, rows: LayerRows) -> list[Block]:
        """Encode consecutive blocks, from block `first` of a text on, each as it would be alone.

        Stops before the first block with NaN or infinity. Raises ValueError if that is block `first`.
        """
        size, count = self.recipe.window.block, self._finite_blocks(first, rows)
        cache = self._cache(first * size, (first + count) * size, rows[0][0].device, rows[0][0].dtype)
        for layer in range(self.geometry.layers):
            k_TC, v_TC = rows[layer]
            cache.take(layer, k_TC[None, : count * size], v_TC[None, : count * size])
            cache.finish(layer)
        return [encoded_block(cache, number) for number in range(count)]

    def decode(
        self, blocks: Sequence[Block], device: torch.device | str = "cpu", start: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (layer, keys after RoPE, values), [tokens, heads, head size] in the stored dtype, layer by layer.

        start   tokens before the first of these blocks
        The next layer is decoded into the same memory.
        """
        cache = self._cache(start, start + len(blocks) * self.recipe.window.block, device)
        fill(cache, blocks, device)
        for layer in range(self.geometry.layers):
            k_BTC, v_BTC = cache.decoder.whole(layer)
            heads = (self.geometry.kv_heads, self.geometry.head_size)
            yield layer, k_BTC[0].unflatten(-1, heads), v_BTC[0].unflatten(-1, heads)
            cache.decoder.forget(layer)

    def _cache(self, start: int, stop: int, device: torch.device | str, dtype: torch.dtype = torch.bfloat16):
        """Make an empty cache for tokens `start` to `stop` of a text."""
        recipe, rotary = self.recipe.with_exact(sinks=max(0, self.recipe.window.sinks - start), recent=0), self.rotary
        cache = BlockCache(recipe, self.geometry, self.tensors, dtype=dtype)
        if rotary is not None:
            rotary = replace(rotary, frequencies_K=rotary.frequencies_K.to(device))
        cache.positions.announce(None, torch.arange(start, stop, device=device)[None] if start else None, rotary)
        return cache

    def _finite_blocks(self, first: int, rows: LayerRows) -> int:
        """Count the blocks before the first with NaN or infinity."""
        rows_TC = [x_TC for layer in range(self.geometry.layers) for x_TC in rows[layer]]
        finite_T = torch.stack([x_TC.float().abs().amax(1) for x_TC in rows_TC]).amax(0).isfinite()
        count = int(finite_T.unflatten(0, (-1, self.recipe.window.block)).all(1).int().cumprod(0).sum())
        if not count:
            raise ValueError(f"block {first}: NaN or infinity in the keys or values; it is not kept")
        return count


def fill(cache: BlockCache, blocks: Sequence[Block], device: torch.device | str) -> None:
    """Put a text's first blocks into an empty cache, as one row."""
    fields, sinks = dict[int, tuple[Slab, Slab]](), dict[int, Tensor]()
    for layer in range(cache.geometry.layers):
        keys, values = (_stacked([block.fields[layer][role] for block in blocks], device) for role in (0, 1))
        fields[layer] = keys, values
        sinks[layer] = torch.cat([block.sinks_2LSC[:, layer] for block in blocks], 1)[:, None].to(device)
    cache.adopt(len(blocks), fields, sinks)


def encoded_block(cache: BlockCache, number: int, row: int = 0) -> Block:
    """Return encoded block `number` of one row of a cache, on the CPU."""
    layers, size = range(cache.geometry.layers), cache.recipe.window.block
    fields: dict[int, tuple[Slab, Slab]] = {layer: ({}, {}) for layer in layers}
    sinks_2LSC = torch.stack([cache.layers[layer].sinks_2BSC[:, row] for layer in layers], 1)
    for layer in layers:
        for role in (0, 1):
            for name, field in cache.layers[layer].fields(role, number, number + 1).items():
                fields[layer][role][name] = field[row, 0].cpu()
    return Block(fields, sinks_2LSC[:, :, number * size : (number + 1) * size].cpu())


def _stacked(parts: list[Slab], device: torch.device | str) -> Slab:
    """Return [1, n, ...] of each field of n blocks."""
    return {name: torch.stack([part[name] for part in parts])[None].to(device) for name in parts[0]}
