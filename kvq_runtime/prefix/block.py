"""Encode blocks of tokens of all layers wherever they stand in a text, and write and read their files.

A `BlockCache` without a window does the work, so the bytes are those of a cache of the same keys and values. A block
needs nothing of the blocks before it. Its file has the packed fields of all layers, as a cache holds them:

    one safetensors file: packed.uint8, packed.float16, ..., sinks

`packed.{dtype}` concatenates all fields of a dtype: by layer, keys before values, in the order of the scheme's fields.
`sinks` are the exact tokens of the block, keys and values: [2, layers, S, C] in the model's dtype; blocks after the
first have none. The metadata key `kvq` holds the name of the block before, the token ids, and `content`, a sha256 of
these and of every tensor.

Recipe, geometry and dtype alone decide what a file contains. A reader takes no size from the file: it refuses larger
files, and any name, shape or dtype but the expected one.

Shapes: T tokens of blocks · C all heads of a token · S sinks among the tokens.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kvq_runtime.artifact import header
from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.shared import Fitted
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import chain
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.storage import Slab

FORMAT = 1  # of names, folders and files
SINKS = "sinks"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of keys and values
_TENSOR_NAMES = re.compile(r"packed\.[a-z0-9]+|sinks")
LayerRows = Mapping[int, tuple[Tensor, Tensor]]  # by layer, keys (after RoPE) and values [T, C]


@dataclass(frozen=True)
class Link:
    """The place of a block in a text: name of the block before (or the root of the text), number, token ids."""

    previous: str
    number: int
    tokens: tuple[int, ...]

    def to_json(self, content: str) -> dict[str, Any]:
        return {"previous": self.previous, "tokens": list(self.tokens), "content": content}


@dataclass(frozen=True)
class Block:
    """One encoded block.

    fields       by layer, of keys and of values, as their codecs encode them, without batch: [...] a field
    sinks_2LSC   exact tokens among the block's own, of the layers in order; S may be 0
    """

    fields: Mapping[int, tuple[Slab, Slab]]
    sinks_2LSC: Tensor


class BlockCodec:
    """A recipe's codecs for tokens at positions that count from 0, and the files of their blocks.

    tensors  of the recipe's fit
    dtype    of the model's keys and values
    rotary   the model's rotation, where the recipe needs positions
    Raises ValueError for a dtype that is not kept.
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        rotary: Rotary | None = None,
    ):
        if dtype not in DTYPES:
            kept = ", ".join(map(_name, DTYPES))
            raise ValueError(f"keys and values of {_name(dtype)}; {kept} are kept: run the model in these")
        self.recipe, self.geometry, self.dtype, self.rotary = recipe.check(geometry), geometry, dtype, rotary
        self.tensors = tensors if isinstance(tensors, Fitted) else Fitted(tensors)  # so that caches share the codecs

    def encode(self, first: int, rows: LayerRows) -> list[Block]:
        """Encode consecutive blocks, from block `first` of a text on, each as it would be alone.

        Stops before the first block with NaN or infinity. Raises ValueError if that is block `first`.
        """
        size, count = self.recipe.window.block, self._finite_blocks(first, rows)
        cache = self._cache(first * size, (first + count) * size, rows[0][0].device)
        for layer in range(self.geometry.layers):
            k_TC, v_TC = rows[layer]
            cache.take(layer, k_TC[None, : count * size], v_TC[None, : count * size])
            cache.finish(layer)
        return [encoded_block(cache, number) for number in range(count)]

    def decode(
        self, blocks: Sequence[Block], device: torch.device | str = "cpu", start: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (layer, keys after RoPE, values), [tokens, heads, head size] in the model's dtype, layer by layer.

        start   tokens before the first of these blocks
        The next layer is decoded into the same memory. Raises ArtifactError for a layer with NaN or infinity, as a
        large scale gives it, above all in float16.
        """
        cache = self._cache(start, start + len(blocks) * self.recipe.window.block, device)
        fill(cache, blocks, device)
        for layer in range(self.geometry.layers):
            k_BTC, v_BTC = cache.decoder.whole(layer)
            if not all(bool(x_BTC.isfinite().all()) for x_BTC in (k_BTC, v_BTC)):
                raise ArtifactError(f"finite: layer {layer} decodes to NaN or infinity; it is computed again")
            heads = (self.geometry.kv_heads, self.geometry.head_size)
            yield layer, k_BTC[0].unflatten(-1, heads), v_BTC[0].unflatten(-1, heads)
            cache.decoder.forget(layer)

    def _cache(self, start: int, stop: int, device: torch.device | str) -> BlockCache:
        """Make an empty cache for tokens `start` to `stop` of a text."""
        recipe, rotary = self.recipe.with_exact(sinks=max(0, self.recipe.window.sinks - start), recent=0), self.rotary
        cache = BlockCache(recipe, self.geometry, self.tensors, dtype=self.dtype)
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

    def digest(self, model: str) -> str:
        """Return the sha256 of everything that decides how tokens become bytes.

        model   text that differs between models whose keys and values differ
        """
        description = {
            "format": FORMAT, "model": model, "recipe": self.recipe.to_json(), "geometry": self.geometry.shape,
            "dtype": _name(self.dtype), "fit": chain.tensors_digest(self.tensors),
        }  # fmt: skip
        return sha256(strict_json.dumps(description).encode()).hexdigest()

    def sinks(self, number: int) -> int:
        """Return how many tokens of block `number` are sinks."""
        window = self.recipe.window
        return min(max(window.sinks - number * window.block, 0), window.block)

    @cached_property
    def _packed(self) -> dict[torch.dtype, list[tuple[int, int, str, tuple[int, ...]]]]:
        """Layer, role (0 for keys, 1 for values), name and shape of each field, by dtype."""
        packed: dict[torch.dtype, list[tuple[int, int, str, tuple[int, ...]]]] = {}
        for layer in range(self.geometry.layers):
            for role in (0, 1):
                scheme = self.recipe.scheme(layer, ROLES[role])
                specs = scheme.fields(self.recipe.window.block, self.geometry, self.dtype)
                for name, (shape, dtype) in specs.items():
                    packed.setdefault(dtype, []).append((layer, role, name, tuple(shape)))
        return packed

    def specs(self, number: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {name: (shape, dtype)} of every tensor in the file of block `number`."""
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            f"packed.{_name(dtype)}": ((sum(math.prod(shape) for *_, shape in fields),), dtype)
            for dtype, fields in self._packed.items()
        }
        shape = (2, self.geometry.layers, self.sinks(number), self.geometry.width)
        return specs | ({SINKS: (shape, self.dtype)} if shape[2] else {})

    def file_bytes(self, link: Link) -> int:
        """Return the size of a block's file in bytes."""
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self.specs(link.number).items()}
        return len(safetensors.torch.save(tensors, {"kvq": strict_json.dumps(link.to_json("0" * 64))}))

    @cached_property
    def largest(self) -> int:
        """Bytes that no block's file exceeds."""
        return self.file_bytes(Link("0" * 64, 0, ((1 << 31) - 1,) * self.recipe.window.block)) + 16

    def to_bytes(self, block: Block, link: Link) -> bytes:
        """Return the file of a block."""
        tensors = {}
        for dtype, fields in self._packed.items():
            parts = [block.fields[layer][role][name] for layer, role, name, _ in fields]
            assert all(x.dtype == dtype and x.shape == shape for x, (*_, shape) in zip(parts, fields, strict=True))
            tensors[f"packed.{_name(dtype)}"] = torch.cat([x.detach().cpu().flatten() for x in parts])
        if self.sinks(link.number):
            tensors[SINKS] = block.sinks_2LSC.detach().to("cpu", self.dtype).contiguous()
        return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(link.to_json(_content(link, tensors)))})

    def from_bytes(self, data: bytes, link: Link) -> Block:
        """Read the file of the block at this place. Raises ArtifactError, which begins with the failed check."""
        head = header.read(io.BytesIO(data), len(data), _TENSOR_NAMES)
        stated = strict_json.loads(head.kvq, "header: kvq")
        if not isinstance(stated, dict) or stated.get("previous") != link.previous:
            raise ArtifactError("chain: of another recipe, artifact, model, tenant or place; it will be written again")
        if stated != link.to_json(stated.get("content", "")):
            raise ArtifactError("tokens: the file holds other tokens under this name; it will be written again")
        expected, listed = self.specs(link.number), head.specs()
        if listed != expected:
            differing = sorted(name for name in {*listed, *expected} if listed.get(name) != expected.get(name))
            raise ArtifactError(f"tensors: {differing[:3]} are not as recipe {self.recipe.name} stores them")
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise ArtifactError(f"header: safetensors refuses it: {error}") from None
        if _content(link, tensors) != stated["content"]:
            raise ArtifactError("content: the data do not have the stated digest; the file was changed")
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ArtifactError(f"finite: {name} has NaN or infinity")
        fields: dict[int, tuple[Slab, Slab]] = {layer: ({}, {}) for layer in range(self.geometry.layers)}
        for dtype, packed in self._packed.items():
            parts = tensors[f"packed.{_name(dtype)}"].split([math.prod(shape) for *_, shape in packed])
            for (layer, role, name, shape), x in zip(packed, parts, strict=True):
                fields[layer][role][name] = x.view(shape)
        no_sinks = torch.empty(2, self.geometry.layers, 0, self.geometry.width, dtype=self.dtype)
        return Block(fields, tensors.get(SINKS, no_sinks))


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


def _content(link: Link, tensors: Mapping[str, Tensor]) -> str:
    hashed = sha256(strict_json.dumps(link.to_json("")).encode())
    for name in sorted(tensors):
        hashed.update(f"\0{name}\0".encode())
        hashed.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
