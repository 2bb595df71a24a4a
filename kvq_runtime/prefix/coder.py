"""Encode one block of tokens of all layers wherever it stands in a text, and decode blocks in a row.

The bytes are those of a cache of the same keys and values (`store/encode.py`): each block is encoded by a cache of its
own, and needs nothing of the blocks before it.

Shapes: T tokens of one block · C all heads of a token · S sinks among the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec import shared
from kvq_runtime.codec.shared import Fitted
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix.block_file import Block
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import Slab
from kvq_runtime.store.promise import Check

Rows = Mapping[int, tuple[Tensor, Tensor]]  # by layer, keys (after RoPE) and values [T, C]


class Coder:
    """Codecs of a recipe for tokens at positions that count from 0.

    held     layers, in rising order
    rotary   the model's rotation, where the recipe needs positions; may be set later
    check    what a fit promises, so that what is beyond is kept exact; None: errors are not measured
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        held: Sequence[int],
        rotary: Rotary | None = None,
        check: Check | None = None,
    ):
        self.recipe, self.geometry, self.check = recipe.check(geometry), geometry, check
        self.tensors = tensors if isinstance(tensors, Fitted) else Fitted(tensors)  # so that caches share the codecs
        self.held, self.rotary = tuple(held), rotary
        shared.build(recipe, geometry, self.tensors)  # refuses tensors that are not the recipe's

    def encode(self, number: int, rows: Rows) -> Block:
        """Encode the tokens of block `number` of a text. ValueError for NaN or infinity among them."""
        for layer in self.held:
            self._check(layer, number, rows[layer])
        size = self.recipe.window.block
        cache = self._cache(number * size, (number + 1) * size, rows[self.held[0]][0].device, self.check)
        for layer in self.held:
            cache.take(layer, *(x_TC[None] for x_TC in rows[layer]))
            watch = cache.layers[layer].watch
            if watch is not None:
                watch.keeps = True  # a kernel reads codes alone, whoever loads the block may not
            cache.encoder.encode(layer, 1)
            cache.decoder.forget(layer, layer == self.held[-1])
        return held(cache, 0)

    def decode(
        self, blocks: Sequence[Block], device: torch.device | str = "cpu", start: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, keys after RoPE, values) [tokens, heads, head size] of the layers in order, in the stored dtype.

        start   how many tokens are before the first of these blocks
        The two are valid until the next layer's, which are decoded into the same memory.
        """
        cache = self._cache(start, start + len(blocks) * self.recipe.window.block, device)
        fill(cache, blocks, device)
        for layer in self.held:
            k_BTC, v_BTC = cache.decoder.whole(layer)
            heads = (self.geometry.kv_heads, self.geometry.head_size)
            yield layer, k_BTC[0].unflatten(-1, heads), v_BTC[0].unflatten(-1, heads)
            cache.decoder.forget(layer, layer == self.held[-1])

    def _cache(self, start: int, stop: int, device: torch.device | str, check: Check | None = None) -> BlockCache:
        """An empty cache for tokens `start` to `stop` of a text, and no others."""
        recipe = self.recipe.with_exact(sinks=max(0, self.recipe.window.sinks - start)) if start else self.recipe
        cache = BlockCache(recipe, self.geometry, self.tensors, self.held, check=check)
        near = None
        if self.rotary is not None:
            near = Rotary(self.rotary.frequencies_K.to(device), self.rotary.scaling, self.rotary.dtype)
        cache.positions.announce(None, torch.arange(start, stop, device=device)[None] if start else None, near)
        return cache

    def _check(self, layer: int, number: int, pair: tuple[Tensor, Tensor]) -> None:
        for role, x_TC in zip(ROLES, pair, strict=True):
            if x_TC.shape != (self.recipe.window.block, self.geometry.width):
                raise ValueError(
                    f"layer {layer}: {role}s of shape {list(x_TC.shape)}; a block is "
                    f"[{self.recipe.window.block}, {self.geometry.width}]"
                )
            if not bool(torch.isfinite(x_TC).all()):
                raise ValueError(
                    f"layer {layer}, block {number}: NaN or infinity in the {role}s; nothing is kept of it"
                )


def fill(cache: BlockCache, blocks: Sequence[Block], device: torch.device | str) -> None:
    """Put a text's first blocks into an empty cache, as one row."""
    layers = sorted(cache.held)
    fields = {
        layer: tuple(_stacked([block.fields[layer][role] for block in blocks], device) for role in (0, 1))
        for layer in layers
    }
    sinks_2LSC = torch.cat([block.sinks_2LSC for block in blocks], 2).to(device)
    sinks = {layer: sinks_2LSC[:, place][:, None] for place, layer in enumerate(layers)}
    exact: dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]] = {layer: ({}, {}) for layer in layers}
    for number, block in enumerate(blocks):
        for (layer, role), x_TC in block.exact.items():
            exact[layer][role][number] = x_TC[None].to(device)
    cache.adopt(len(blocks), fields, sinks, exact)  # type: ignore[arg-type]


def held(cache: BlockCache, number: int, row: int = 0) -> Block:
    """Encoded block `number` of one row of a cache, as it holds it, on the CPU."""
    layers, size = sorted(cache.held), cache.recipe.window.block
    fields: dict[int, tuple[Slab, Slab]] = {layer: ({}, {}) for layer in layers}
    exact: dict[tuple[int, int], Tensor] = {}
    for layer in layers:
        store = cache.layers[layer]
        for role in (0, 1):
            for name, field in store.fields(role, number, number + 1).items():
                fields[layer][role][name] = field[row, 0].cpu()
            if store.watch is not None and number in store.watch.exact[role]:
                exact[layer, role] = store.watch.exact[role][number][row].cpu()
    sinks_2LSC = torch.stack([cache.layers[layer].sinks_2BSC[:, row] for layer in layers], 1)
    return Block(fields, sinks_2LSC[:, :, number * size : (number + 1) * size], exact)


def _stacked(parts: list[Slab], device: torch.device | str) -> Slab:
    """[1, n, ...] of the fields of n blocks."""
    return {name: torch.stack([part[name] for part in parts])[None].to(device) for name in parts[0]}
