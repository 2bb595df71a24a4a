"""Write and read the file of one block of tokens: the packed fields of all layers, as a cache holds them.

    one safetensors file: packed.uint8, packed.float16, ..., sinks

`packed` are all fields of one dtype, one behind the other: by layer, keys before values, in the order of the scheme's
fields. `sinks` are the exact tokens among the block's own, keys and values: [2, layers, S, C] in the model's dtype;
blocks after the first have none. The metadata key `kvq` holds the chain (root, previous, number, tokens) and `content`,
a sha256 of that and of every tensor.

Recipe, geometry and dtype alone decide what a file contains, so that reading takes no size from the file: larger files
are not read, and every name, shape and dtype has to be the expected one.
"""

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kvq_runtime.artifact import header
from kvq_runtime.artifact.artifact import MAX_LAYERS, MAX_WIDTH
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.prefix import chain
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.storage import Slab

FORMAT = 1  # of names, folders and files
SINKS = "sinks"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}  # of keys and values
_NAMES = re.compile(r"packed\.[a-z0-9]+|sinks")


@dataclass(frozen=True)
class Link:
    """A block's place in a chain: root of the chain, name of the block before (or the root), number, token ids."""

    root: str
    previous: str
    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """One encoded block.

    fields       by layer, of keys and of values, as their codecs encode them, without batch: [...] a field
    sinks_2LSC   exact tokens among the block's own, of the layers in order; S may be 0
    """

    fields: Mapping[int, tuple[Slab, Slab]]
    sinks_2LSC: Tensor


class _Field(NamedTuple):
    """A field of one layer's keys, or values."""

    layer: int
    role: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BlockFormat:
    """The contents of a block's file.

    dtype   of the model's keys and values
    Raises ValueError for a dtype that is not kept.
    """

    recipe: Recipe
    geometry: Geometry
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise ValueError(
                f"keys and values of {_name(self.dtype)}; {', '.join(DTYPES)} are kept: run the model in one of "
                "these, its cache not in fp8"
            )

    def describe(self, model: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return all that decides how tokens become bytes, as JSON; its digest names a set of blocks.

        model     text that differs for models whose keys and values differ
        tensors   of the recipe's fit
        """
        fit = None
        if tensors:
            hashed = sha256()
            chain.add_tensors(hashed, tensors)
            fit = hashed.hexdigest()
        return {
            "format": FORMAT, "model": model, "recipe": self.recipe.to_json(), "fit": fit,
            "geometry": self.geometry.shape, "dtype": _name(self.dtype),
        }  # fmt: skip

    @staticmethod
    def of_description(about: Any) -> "BlockFormat":
        """Read a description. Raises ArtifactError for anything that `describe` does not return."""
        strict_json.keys(about, {"format", "model", "recipe", "fit", "geometry", "dtype"}, "about")
        if about["format"] != FORMAT:
            raise ArtifactError(f"about: format {about['format']!r:.40}; this version reads {FORMAT}")
        try:
            geometry = Geometry(**strict_json.keys(about["geometry"], {"layers", "kv_heads", "head_size"}, "about"))
            if geometry.layers > MAX_LAYERS or geometry.width > MAX_WIDTH:
                raise ValueError(f"{geometry}; at most {MAX_LAYERS} layers and {MAX_WIDTH} channels are read")
            return BlockFormat(Recipe.from_json(about["recipe"]).check(geometry), geometry, DTYPES[about["dtype"]])
        except (ValueError, TypeError, KeyError) as error:
            raise ArtifactError(f"about: {error}") from None

    def sinks(self, number: int) -> int:
        """Return how many of a block's tokens are sinks."""
        window = self.recipe.window
        return min(max(window.sinks - number * window.block, 0), window.block)

    @cached_property
    def _packed(self) -> dict[str, list[_Field]]:
        """The fields by the name of their tensor."""
        packed: dict[str, list[_Field]] = {}
        for layer in range(self.geometry.layers):
            for role in (0, 1):
                scheme = self.recipe.scheme(layer, ROLES[role])
                specs = scheme.fields(self.recipe.window.block, self.geometry, self.dtype)
                for name, (shape, dtype) in specs.items():
                    fields = packed.setdefault(f"packed.{_name(dtype)}", [])
                    fields.append(_Field(layer, role, name, tuple(shape), dtype))
        return packed

    def specs(self, number: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every tensor of a block's file: {name: (shape, dtype)}."""
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((sum(one.numbers for one in fields),), fields[0].dtype) for name, fields in self._packed.items()
        }
        shape = (2, self.geometry.layers, self.sinks(number), self.geometry.width)
        return specs | ({SINKS: (shape, self.dtype)} if shape[2] else {})

    def file_bytes(self, link: Link) -> int:
        """Bytes of the file of a block."""
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self.specs(link.number).items()}
        return len(safetensors.torch.save(tensors, {"kvq": strict_json.dumps(_about(link) | {"content": "0" * 64})}))

    @cached_property
    def largest(self) -> int:
        """Bytes that no block's file exceeds."""
        most = (1 << 31) - 1
        return self.file_bytes(Link("0" * 64, "0" * 64, 0, (most,) * self.recipe.window.block)) + 16

    def to_bytes(self, block: Block, link: Link) -> bytes:
        """Return the file of a block. Raises ValueError for fields of another shape or dtype."""
        tensors = {name: torch.cat([self._part(block, one) for one in fields]) for name, fields in self._packed.items()}
        if self.sinks(link.number):
            tensors[SINKS] = block.sinks_2LSC.detach().to("cpu", self.dtype).contiguous()
        about = _about(link)
        about["content"] = _content(about, tensors)
        return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})

    def _part(self, block: Block, field: _Field) -> Tensor:
        part = block.fields[field.layer][field.role][field.name].detach().cpu()
        if tuple(part.shape) != field.shape or part.dtype != field.dtype:
            raise ValueError(
                f"{ROLES[field.role]}.{field.layer}.{field.name}: {_name(part.dtype)} {list(part.shape)}; the recipe "
                f"stores {_name(field.dtype)} {list(field.shape)}"
            )
        return part.flatten()

    def from_bytes(self, data: bytes, link: Link) -> Block:
        """Read the block of a file, which has to be this one. Raises ArtifactError, which begins with the check."""
        head = header.read(io.BytesIO(data), len(data), _NAMES)
        stated = _stated(head)
        if stated.root != link.root:
            raise ArtifactError("chain: of another recipe, artifact, model or tenant; it will be written again")
        if (stated.previous, stated.number) != (link.previous, link.number):
            raise ArtifactError("chain: the file is of another place in a chain; it will be written again")
        if stated.tokens != link.tokens:
            raise ArtifactError("tokens: the file holds other tokens under this name; it will be written again")
        return self._read(data, head, link)

    def read(self, data: bytes) -> tuple[Link, Block]:
        """Read the block of a file, whatever its place in a chain, with the same checks."""
        head = header.read(io.BytesIO(data), len(data), _NAMES)
        link = _stated(head)
        if len(link.tokens) != self.recipe.window.block:
            raise ArtifactError(f"tokens: {len(link.tokens)} of them; a block has {self.recipe.window.block}")
        return link, self._read(data, head, link)

    def _read(self, data: bytes, head: header.Header, link: Link) -> Block:
        expected, listed = self.specs(link.number), head.specs()
        if listed != expected:
            differ = sorted(name for name in {*listed, *expected} if listed.get(name) != expected.get(name))
            raise ArtifactError(f"tensors: {differ[:3]} are not as recipe {self.recipe.name} stores them")
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise ArtifactError(f"header: safetensors refuses it: {error}") from None
        if _content(_about(link), tensors) != strict_json.loads(head.kvq, "header: kvq")["content"]:
            raise ArtifactError("content: the digest of the data is another than stated; the file was changed")
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ArtifactError(f"finite: {name} has NaN or infinity")
        fields: dict[int, tuple[Slab, Slab]] = {layer: ({}, {}) for layer in range(self.geometry.layers)}
        for name, packed in self._packed.items():
            for one, x in zip(packed, tensors[name].split([one.numbers for one in packed]), strict=True):
                fields[one.layer][one.role][one.name] = x.view(one.shape)
        nothing = torch.empty(2, self.geometry.layers, 0, self.geometry.width, dtype=self.dtype)
        return Block(fields, tensors.get(SINKS, nothing))


def digest(about: Mapping[str, Any]) -> str:
    """Return the sha256 of a description."""
    return sha256(strict_json.dumps(dict(about)).encode()).hexdigest()


def _about(link: Link) -> dict[str, Any]:
    return {"root": link.root, "previous": link.previous, "number": link.number, "tokens": list(link.tokens)}


def _stated(head: header.Header) -> Link:
    """The place in a chain that a file states."""
    about = strict_json.loads(head.kvq, "header: kvq")
    strict_json.keys(about, {"root", "previous", "number", "tokens", "content"}, "header: kvq")
    tokens, number = about["tokens"], about["number"]
    texts = [about[name] for name in ("root", "previous", "content")]
    if not all(isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) for text in texts):
        raise ArtifactError("header: kvq: root, previous and content must be 64 hex digits")
    whole = [number, *tokens] if isinstance(tokens, list) else [None]
    if not all(type(n) is int and 0 <= n < 1 << 31 for n in whole):
        raise ArtifactError("header: kvq: number and tokens must be whole numbers from 0 to 2^31 - 1")
    return Link(about["root"], about["previous"], number, tuple(tokens))


def _content(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    hashed = sha256(strict_json.dumps(dict(about)).encode())
    for name in sorted(tensors):
        hashed.update(f"\0{name}\0".encode())
        hashed.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
