"""Encode one block of tokens of all layers wherever it stands in a text, and decode blocks in a row.

The bytes are those of a cache of the same keys and values (`store/encode.py`): the same codecs, prepared by the
same `block_input`. A block needs nothing of the blocks before it; under a recipe that predicts across layers it needs
its own tokens of the layers below, which are decoded here on the way up. (A cache for each block would do the same, and
takes up to 1.6 times as long.)

Shapes: T tokens of one block · C all heads of a token · S sinks among the tokens.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from kvq_runtime.store.promise import Check, Watch, decode_beyond, encode_beyond
from kvq_runtime.store.storage import Slab

Rows = Mapping[int, tuple[Tensor, Tensor]]  # by layer, keys (after RoPE) and values [T, C]
_Coded = tuple[Codec, Tensor, Context, Tensor]  # the codec of a role, what it encoded, and what that decodes to


class Coder:
    """Codecs of a recipe for tokens at positions that count from 0.

    rotary   the model's rotation, where the recipe needs positions; may be set later
    check    what a fit promises, so that tokens beyond are kept beside codes; None: errors are not measured
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        rotary: Rotary | None = None,
        check: Check | None = None,
    ):
        self.recipe, self.geometry, self.check = recipe.check(geometry), geometry, check
        self.tensors = tensors if isinstance(tensors, Fitted) else Fitted(tensors)  # so that caches share the codecs
        self.rotary = rotary
        self._codecs = shared.build(recipe, geometry, self.tensors)
        self._depth = max(1, *map(_reads, self._codecs))  # of layers below that are read

    def encode_run(self, first: int, rows: Rows) -> list[Block]:
        """Encode blocks in a row, from block `first` of a text on, each as it would be alone.

        They go up the layers together, so that a layer's matrices are unpacked once for all. Of blocks from the first
        with NaN or infinity on there are none; of block `first` that is a ValueError.
        """
        size = self.recipe.window.block
        count = self._finite(first, rows)
        begun = [_Begun(number, self._sinks(number)) for number in range(first, first + count)]
        spans = [*self._spans(first, count)]
        for layer in range(self.geometry.layers):
            codecs = [shared.moved(codec, rows[layer][0].device) for codec in self._codecs[layer]]
            if count > 1:
                codecs = [codec.unpacked() for codec in codecs]
            k_NTC, v_NTC = (x_TC[: count * size].unflatten(0, (count, size)) for x_TC in rows[layer])
            self._encode(begun, spans, layer, (codecs[0], codecs[1]), (k_NTC, v_NTC))
        return [Block(one.fields, torch.stack(one.exact, 1), one.beyond) for one in begun]

    def _sinks(self, number: int) -> int:
        """Return how many of a block's tokens are sinks."""
        window = self.recipe.window
        return min(max(window.sinks - number * window.block, 0), window.block)

    def _spans(self, first: int, count: int) -> Iterator["_Span"]:
        """The blocks that have sinks one by one, and the others together."""
        window, positions = self.recipe.window, Positions()
        positions.announce(None, None, self.rotary)
        alone = [number for number in range(first, first + count) if self._sinks(number)]
        rest = [(first + len(alone), first + count)] if len(alone) < count else []
        for begin, end in [*((number, number + 1) for number in alone), *rest]:
            start, stop, tables = begin * window.block, end * window.block, None
            if "positions" in self.recipe.needs:
                tables = tuple(one[0].unflatten(0, (end - begin, -1)) for one in positions.rope(start, stop))
            yield _Span(
                slice(begin - first, end - first),
                positions.source(start, stop, window.sinks),
                tables,  # type: ignore[arg-type]
                positions.valid(start, stop, window.sinks) if begin in alone else None,
            )

    def _encode(
        self,
        begun: list["_Begun"],
        spans: Sequence["_Span"],
        layer: int,
        codecs: tuple[Codec, Codec],
        pair_NTC: tuple[Tensor, Tensor],
    ) -> None:
        """Encode these blocks' tokens of one layer, those of all layers below being encoded."""
        keys, values = codecs
        inputs = [self._inputs(one, keys, *(x_NTC[one.places] for x_NTC in pair_NTC)) for one in spans]
        x_each = [x for x_NTC, *_ in inputs for x in x_NTC.split(1)]
        v_each = [v for *_, v_NTC in inputs for v in v_NTC.split(1)]
        ropes = [pair for _, rope, v in inputs for pair in (_each(rope) if rope else [None] * len(v))]
        if self.recipe.cross_layer or self.check:
            below = [[one.decoded[layer - depth] for depth in range(1, _reads(codecs) + 1)] for one in begun]
            contexts = [Context(rope, None, under) for rope, under in zip(ropes, below, strict=True)]
            k_encoded = keys.encode_each([*zip(x_each, contexts, strict=True)])
            k_decoded = keys.decode_each(k_encoded)
            contexts = [Context(None, read, under) for read, under in zip(k_decoded, below, strict=True)]
            v_encoded = values.encode_each([*zip(v_each, contexts, strict=True)])
            v_decoded = values.decode_each(v_encoded)
            for one, *pair in zip(begun, k_decoded, v_decoded, strict=True):
                one.decoded[layer] = pair[0], pair[1]
                one.decoded.pop(layer - self._depth, None)
            for span, (x_NTC, rope, v_NTC) in zip(spans, inputs, strict=True) if self.check else ():
                k_decoded_NTC, v_decoded_NTC = (torch.cat(one[span.places]) for one in (k_decoded, v_decoded))
                found = (keys, x_NTC, Context(rope), k_decoded_NTC), (values, v_NTC, Context(), v_decoded_NTC)
                self._check(begun[span.places], span, layer, found, pair_NTC)
            encoded = [(k_fields, v_fields) for (k_fields, _), (v_fields, _) in zip(k_encoded, v_encoded, strict=True)]
        else:
            each = zip(x_each, ropes, v_each, strict=True)
            encoded = [(keys.encode(x, Context(rope)), values.encode(v, Context())) for x, rope, v in each]
        for place, (one, (k_fields, v_fields)) in enumerate(zip(begun, encoded, strict=True)):
            one.fields[layer] = _first(k_fields), _first(v_fields)
            one.exact.append(torch.stack([x_NTC[place, : one.sinks] for x_NTC in pair_NTC]))

    def _inputs(
        self, span: "_Span", keys: Codec, k_NTC: Tensor, v_NTC: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]:
        """Keys of blocks as their codec wants them, their cos and sin or None, and their values: [N, T, C]."""
        x_NTC, rope = k_NTC.clone(), None
        if span.tables is not None:
            undo = "undo" if self.recipe.position == "pre" else None
            cos, sin = (table.to(k_NTC.device) for table in span.tables)
            x_NTC, rope = block_input(x_NTC, span.source_NS, (cos, sin), undo, self.geometry.kv_heads)
            x_NTC = x_NTC.to(k_NTC.dtype) if keys.scheme.quantize.keeps_dtype else x_NTC
        else:
            x_NTC, _ = block_input(x_NTC, span.source_NS)
        return x_NTC, rope, block_input(v_NTC.clone(), span.source_NS)[0]

    def _check(
        self,
        begun: Sequence["_Begun"],
        span: "_Span",
        layer: int,
        found: Sequence[_Coded],
        pair_NTC: Sequence[Tensor],
    ) -> None:
        """Keep beside its codes what of blocks' keys and values is beyond what the artifact promises of errors."""
        assert self.check is not None
        watch, first = Watch(self.check, layer, keeps=True), begun[0].number
        counted = None if span.counted is None else span.counted.to(pair_NTC[0].device)
        errors_2N = torch.stack([watch.errors(*each, counted) for each in found])
        for role, number in watch.beyond(errors_2N[:, None], first):
            one, x_TC = begun[number - first], pair_NTC[role][span.places][number - first]
            one.beyond[layer, role] = encode_beyond(x_TC, one.sinks, watch.promises[role])

    def decode(
        self, blocks: Sequence[Block], device: torch.device | str = "cpu", start: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, keys after RoPE, values) [tokens, heads, head size] of the layers in order, in the stored dtype.

        start   how many tokens are before the first of these blocks
        The two are valid until the next layer's, which are decoded into the same memory.
        """
        cache = self._cache(start, start + len(blocks) * self.recipe.window.block, device)
        fill(cache, blocks, device)
        for layer in range(self.geometry.layers):
            k_BTC, v_BTC = cache.decoder.whole(layer)
            heads = (self.geometry.kv_heads, self.geometry.head_size)
            yield layer, k_BTC[0].unflatten(-1, heads), v_BTC[0].unflatten(-1, heads)
            cache.decoder.forget(layer, layer == self.geometry.layers - 1)

    def _cache(self, start: int, stop: int, device: torch.device | str) -> BlockCache:
        """An empty cache for tokens `start` to `stop` of a text, and no others."""
        recipe = self.recipe.with_exact(sinks=max(0, self.recipe.window.sinks - start)) if start else self.recipe
        cache = BlockCache(recipe, self.geometry, self.tensors)
        near = None
        if self.rotary is not None:
            near = Rotary(self.rotary.frequencies_K.to(device), self.rotary.scaling, self.rotary.dtype)
        cache.positions.announce(None, torch.arange(start, stop, device=device)[None] if start else None, near)
        return cache

    def _finite(self, first: int, rows: Rows) -> int:
        """Return how many of these blocks are before one with NaN or infinity, all if there is none."""
        size, width = self.recipe.window.block, self.geometry.width
        count = good = max(1, len(rows[0][0]) // size)
        for layer in range(self.geometry.layers):
            for role, x_TC in zip(ROLES, rows[layer], strict=True):
                if x_TC.shape != (count * size, width):
                    raise ValueError(
                        f"layer {layer}: {role}s of shape {list(x_TC.shape)}; {count} "
                        f"{'block is' if count == 1 else 'blocks are'} [{count * size}, {width}]"
                    )
                finite_T = x_TC[: good * size].float().abs().amax(1).isfinite()  # ten times as fast as `isfinite` alone
                if not bool(finite_T.all()):
                    good = int(finite_T.int().argmin()) // size
                if not good:
                    raise ValueError(
                        f"layer {layer}, block {first}: NaN or infinity in the {role}s; nothing is kept of it"
                    )
        return good


@dataclass(frozen=True)
class _Span:
    """Blocks of a run that are prepared together: which; the tokens that their slots hold, if not each its own; their
    cos and sin, [N, T, K] each; and which are counted in errors, if not all."""

    places: slice
    source_NS: Tensor | None
    tables: tuple[Tensor, Tensor] | None
    counted: Tensor | None


@dataclass(frozen=True)
class _Begun:
    """A block while it is encoded: how many sinks are among its tokens; and of the layers so far what it is encoded as,
    decoded, and what is kept beside that."""

    number: int
    sinks: int
    decoded: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)
    fields: dict[int, tuple[Slab, Slab]] = dataclasses.field(default_factory=dict)
    exact: list[Tensor] = dataclasses.field(default_factory=list)
    beyond: dict[tuple[int, int], Tensor] = dataclasses.field(default_factory=dict)


def fill(cache: BlockCache, blocks: Sequence[Block], device: torch.device | str) -> None:
    """Put a text's first blocks into an empty cache, as one row."""
    layers = range(cache.geometry.layers)
    fields = {
        layer: tuple(_stacked([block.fields[layer][role] for block in blocks], device) for role in (0, 1))
        for layer in layers
    }
    sinks_2LSC = torch.cat([block.sinks_2LSC for block in blocks], 2).to(device)
    sinks = {layer: sinks_2LSC[:, place][:, None] for place, layer in enumerate(layers)}
    exact: dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]] = {layer: ({}, {}) for layer in layers}
    for number, block in enumerate(blocks):
        for (layer, role), kept in block.exact.items():
            tokens_TC = decode_beyond(kept, cache.recipe.window.block, sinks_2LSC.dtype)
            exact[layer][role][number] = tokens_TC[None].to(device)
    cache.adopt(len(blocks), fields, sinks, exact)  # type: ignore[arg-type]


def held(cache: BlockCache, number: int, row: int = 0) -> Block:
    """Encoded block `number` of one row of a cache, as it holds it, on the CPU."""
    layers, size = range(cache.geometry.layers), cache.recipe.window.block
    fields: dict[int, tuple[Slab, Slab]] = {layer: ({}, {}) for layer in layers}
    exact: dict[tuple[int, int], Tensor] = {}
    sinks_2LSC = torch.stack([cache.layers[layer].sinks_2BSC[:, row] for layer in layers], 1)
    sinks_2LSC = sinks_2LSC[:, :, number * size : (number + 1) * size]
    for layer in layers:
        store = cache.layers[layer]
        for role in (0, 1):
            for name, field in store.fields(role, number, number + 1).items():
                fields[layer][role][name] = field[row, 0].cpu()
            if store.watch is not None and number in store.watch.exact[role]:
                x_TC = store.watch.exact[role][number][row]
                exact[layer, role] = encode_beyond(x_TC, sinks_2LSC.shape[2], store.watch.promises[role])
    return Block(fields, sinks_2LSC, exact)


def window_rows(cache: BlockCache, number: int, end: int, row: int) -> Rows:
    """Exact keys and values [T, C] of blocks that are still in the window."""
    size, found = cache.recipe.window.block, {}
    for layer in range(cache.geometry.layers):
        store = cache.layers[layer]
        found[layer] = tuple(store.window_2BTC[:, row, number * size - store.encoded : end * size - store.encoded])
    return found


def _stacked(parts: list[Slab], device: torch.device | str) -> Slab:
    """[1, n, ...] of the fields of n blocks."""
    return {name: torch.stack([part[name] for part in parts])[None].to(device) for name in parts[0]}


def _each(rope: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(*(part.split(1) for part in rope), strict=True)


def _first(fields: Slab) -> Slab:
    return {name: field[0] for name, field in fields.items()}


def _reads(pair: tuple[Codec, Codec]) -> int:
    """Return how many layers below a layer its predictions read."""
    return max(max(codec.below, default=0) for codec in pair)
