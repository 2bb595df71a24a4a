"""Encode one block of tokens of all layers wherever it stands in a text, and decode blocks in a row.

The bytes are those of a cache of the same keys and values (`store/encode.py`): the same codecs, prepared by the
same `block_input`. A block needs nothing of the blocks before it; under a recipe that predicts across layers it needs
its own tokens of the layers below, which are decoded here on the way up. (A cache for each block would do the same, and
takes up to 1.6 times as long.)

Shapes: T tokens of one block · C all heads of a token · S sinks among the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec import shared
from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.codec.shared import Fitted
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix.block_file import Block
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.promise import Check, Watch
from kvq_runtime.store.storage import Slab

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
        self._codecs = shared.build(recipe, geometry, self.tensors)

    def encode(self, number: int, rows: Rows) -> Block:
        """Encode the tokens of block `number` of a text. ValueError for NaN or infinity among them."""
        window, positions = self.recipe.window, self._positions()
        start, stop = number * window.block, (number + 1) * window.block
        source_NS = positions.source(start, stop, window.sinks)
        tables = positions.rope(start, stop) if "positions" in self.recipe.needs else None
        decoded: dict[int, tuple[Tensor, Tensor]] = {}
        fields: dict[int, tuple[Slab, Slab]] = {}
        sinks = min(max(window.sinks - start, 0), window.block)
        counted = positions.valid(start, stop, window.sinks) if sinks else None
        beyond: dict[tuple[int, int], Tensor] = {}
        for layer in self.held:
            self._check(layer, number, rows[layer])
            k_NTC, v_NTC = (x_TC[None] for x_TC in rows[layer])
            keys, values = (shared.moved(codec, k_NTC.device) for codec in self._codecs[layer])
            below = [decoded[layer - depth] for depth in range(1, _reads((keys, values)) + 1)]
            x_NTC, rope = k_NTC.clone(), None
            if tables is not None:
                undo = "undo" if self.recipe.position == "pre" else None
                cos, sin = (table.to(k_NTC.device) for table in tables)
                x_NTC, rope = block_input(x_NTC, source_NS, (cos, sin), undo, self.geometry.kv_heads)
                x_NTC = x_NTC.to(k_NTC.dtype) if keys.scheme.quantize.keeps_dtype else x_NTC
            else:
                x_NTC, _ = block_input(x_NTC, source_NS)
            k_fields = keys.encode(x_NTC, Context(rope, None, below))
            k_decoded = keys.decode(k_fields, Context(below=below)) if self.recipe.cross_layer or self.check else None
            v_NTC, _ = block_input(v_NTC.clone(), source_NS)
            from_keys = Context(keys=k_decoded, below=below)
            v_fields = values.encode(v_NTC, from_keys)
            if k_decoded is not None:
                decoded[layer] = k_decoded, values.decode(v_fields, from_keys)
            if self.check is not None:
                watch = Watch(self.check, layer, keeps=True)
                pairs = (keys, x_NTC, Context(rope), decoded[layer][0]), (values, v_NTC, from_keys, decoded[layer][1])
                errors = torch.stack(
                    [watch.errors(*one, None if counted is None else counted.to(v_NTC.device)) for one in pairs]
                )
                beyond |= {(layer, role): rows[layer][role] for role, _ in watch.beyond(errors[:, None], number)}
            fields[layer] = _first(k_fields), _first(v_fields)
        exact = [torch.stack(rows[layer])[:, :sinks] for layer in self.held]
        return Block(fields, torch.stack(exact, 1), beyond)

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

    def _cache(self, start: int, stop: int, device: torch.device | str) -> BlockCache:
        """An empty cache for tokens `start` to `stop` of a text, and no others."""
        recipe = self.recipe.with_exact(sinks=max(0, self.recipe.window.sinks - start)) if start else self.recipe
        cache = BlockCache(recipe, self.geometry, self.tensors, self.held)
        near = None
        if self.rotary is not None:
            near = Rotary(self.rotary.frequencies_K.to(device), self.rotary.scaling, self.rotary.dtype)
        cache.positions.announce(None, torch.arange(start, stop, device=device)[None] if start else None, near)
        return cache

    def _positions(self) -> Positions:
        positions = Positions()
        positions.announce(None, None, self.rotary)
        return positions

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


def _first(fields: Slab) -> Slab:
    return {name: field[0] for name, field in fields.items()}


def _reads(pair: tuple[Codec, Codec]) -> int:
    """Return how many layers below a layer its predictions read."""
    return max(max(codec.below, default=0) for codec in pair)
