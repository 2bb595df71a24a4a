"""Write and read the file of one block of tokens: the packed fields of all layers, as a cache holds them.

    one safetensors file: packed.uint8, packed.float16, ..., sinks, coded, lossless, key.{layer}.exact, ...

`packed` are all fields of one dtype, one behind the other: by layer, keys before values, in the order of the scheme's
fields. `sinks` are the exact tokens among the block's own, keys and values: [2, layers, S, C] in the model's dtype, or
coded without loss, [bytes] (`ops/lossless.py`); blocks after the first have none. `exact` is what is kept of the tokens
of the keys, or values, of a layer whose error is beyond what the fit promised (`store/promise.py`), and only there.
`coded` [bytes] are the fields, of all layers, that a recipe entropy-codes at rest (`ops/entropy.py`): of any length up
to that of the codes; `lossless` likewise are those that it codes without loss. The metadata key `kvq` holds the chain
(root, previous, number, tokens) and `content`, a sha256 of that and of every tensor.

What a file may contain follows from recipe, geometry and dtype alone, so that reading takes no size from the file:
longer ones are not read, and every name, shape and dtype has to be the expected one. What was coded can be checked
without a fit's tensors, by the digest, but not decoded; what was coded without loss needs none, but the library.
"""

import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kvq_runtime.artifact import header
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops import entropy, lossless
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.stage import Quantizer
from kvq_runtime.store.promise import decode_beyond, sizes_beyond
from kvq_runtime.store.storage import Slab

CHECKS = ("header", "chain", "tokens", "tensors", "content", "finite", "coded", "lossless")
CODED, LOSSLESS, EXACT, SINKS = "coded", "lossless", "exact", "sinks"
LENGTH = 1024  # tokens of the prefix for which bits are stated
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}  # of keys and values
_NAMES = re.compile(r"packed\.[a-z0-9]+|sinks|coded|lossless|(key|value)\.(0|[1-9][0-9]{0,3})\.exact")


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
    exact        by layer and role what is kept, beside codes, of tokens that are beyond their promise
    """

    fields: Mapping[int, tuple[Slab, Slab]]
    sinks_2LSC: Tensor
    exact: Mapping[tuple[int, int], Tensor] = dataclasses.field(default_factory=dict)

    def cpu(self) -> "Block":
        """The same on the CPU."""
        fields: dict[int, tuple[Slab, Slab]] = {
            layer: ({name: x.cpu() for name, x in keys.items()}, {name: x.cpu() for name, x in values.items()})
            for layer, (keys, values) in self.fields.items()
        }
        return Block(fields, self.sinks_2LSC.cpu(), {site: x.cpu() for site, x in self.exact.items()})


class _Site(NamedTuple):
    """A field of one layer's keys, or values."""

    layer: int
    role: int
    field: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


class _Stream(NamedTuple):
    """Fields that are coded together, in this order, in at most `longest` bytes."""

    sites: Sequence[_Site]
    longest: int


@dataclass(frozen=True)
class BlockFormat:
    """The contents of a block's file.

    dtype        of the model's keys and values
    tensors      of the fit; None: blocks are checked, and fields that are coded are missing in them, and what is coded
                 without loss if the library is missing
    promised     whether there is a promise, so that blocks may be beyond it
    coded_sinks  whether sinks are coded without loss, which needs the library
    Raises ValueError for a dtype that is not kept.
    """

    recipe: Recipe
    geometry: Geometry
    dtype: torch.dtype
    tensors: Mapping[str, Tensor] | None = dataclasses.field(default=None, compare=False, repr=False)
    promised: bool = False
    coded_sinks: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise ValueError(
                f"keys and values of {_name(self.dtype)}; {', '.join(DTYPES)} are kept: run the model in one of "
                "these, its cache not in fp8"
            )

    def sinks(self, number: int) -> int:
        """Return how many of a block's tokens are sinks."""
        window = self.recipe.window
        return min(max(window.sinks - number * window.block, 0), window.block)

    @cached_property
    def _sites(self) -> list[_Site]:
        places = [(layer, role) for layer in range(self.geometry.layers) for role in (0, 1)]
        return [_Site(*place, *spec) for place in places for spec in self._fields(*place)]

    @cached_property
    def _packed(self) -> dict[str, list[_Site]]:
        """The fields that are stored as they are, by the name of their tensor."""
        found: dict[str, list[_Site]] = {}
        for one in self._sites:
            if one.field not in (*self._stage(one).at_rest, *self._stage(one).lossless):
                found.setdefault(f"packed.{_name(one.dtype)}", []).append(one)
        return found

    @cached_property
    def _streams(self) -> dict[str, _Stream]:
        """The streams that a block has, by the names of their tensors."""
        codes = [one for one in self._sites if one.field in self._stage(one).at_rest]
        numbers = [one for one in self._sites if one.field in self._stage(one).lossless]
        found = {CODED: _Stream(codes, entropy.most(sum(one.numbers for one in codes)))} if codes else {}
        most = lossless.most(sum(one.numbers for one in numbers), self.dtype)
        return found | ({LOSSLESS: _Stream(numbers, most)} if numbers else {})

    def _stage(self, site: _Site) -> Quantizer:
        return self.recipe.scheme(site.layer, ROLES[site.role]).quantize

    @cached_property
    def _rungs(self) -> list[Tensor]:
        """The rungs that a fit gave the channels of entropy-coded fields."""
        assert self.tensors is not None, "coded fields without the tensors of a fit"
        sites = self._streams[CODED].sites
        return [self.tensors[f"layers.{one.layer}.{ROLES[one.role]}.quantize.rung"].cpu() for one in sites]

    def _fields(self, layer: int, role: int) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        scheme = self.recipe.scheme(layer, ROLES[role])
        specs = scheme.fields(self.recipe.window.block, self.geometry, self.dtype)
        return tuple((name, tuple(shape), dtype) for name, (shape, dtype) in specs.items())

    def specs(self, number: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every tensor of a block's file but what is coded: {name: (shape, dtype)}."""
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((sum(one.numbers for one in sites),), sites[0].dtype) for name, sites in self._packed.items()
        }
        shape = (2, self.geometry.layers, self.sinks(number), self.geometry.width)
        return specs | ({SINKS: (shape, self.dtype)} if shape[2] and not self.coded_sinks else {})

    def longest(self, number: int) -> dict[str, int]:
        """Of every tensor of a block's file that is coded, the most bytes that it may have."""
        count = 2 * self.geometry.layers * self.sinks(number) * self.geometry.width
        sinks = {SINKS: lossless.most(count, self.dtype)} if count and self.coded_sinks else {}
        return {name: stream.longest for name, stream in self._streams.items()} | sinks

    @cached_property
    def _exact(self) -> dict[str, tuple[int, int]]:
        """(layer, role) of what may be beyond, by the name of its tensor."""
        sites = [(layer, role) for layer in range(self.geometry.layers) for role in (0, 1)] if self.promised else []
        return {f"{ROLES[role]}.{layer}.{EXACT}": (layer, role) for layer, role in sites}

    @property
    def coded(self) -> bool:
        """True if any fields are entropy-coded."""
        return bool(self._streams)

    def data_bytes(self, number: int) -> int:
        """Bytes of a block's tensors, as many as there can be."""
        plain = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.specs(number).values())
        return plain + sum(self.longest(number).values())

    def file_bytes(self, link: Link) -> int:
        """Bytes of the file of a block in which nothing is coded, nor beyond."""
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self.specs(link.number).items()}
        return len(safetensors.torch.save(tensors, {"kvq": strict_json.dumps(_about(link) | {"content": "0" * 64})}))

    def usual(self) -> int:
        """Bytes that no block's file exceeds in which nothing is beyond."""
        return self.data_bytes(0) + 200 * (len(self._packed) + 1) + 1024 + 12 * self.recipe.window.block

    def largest(self) -> int:
        """Bytes that no block's file exceeds."""
        each = 200 + self.recipe.window.block * self.geometry.width * self.dtype.itemsize
        return self.usual() + len(self._exact) * each

    def to_bytes(self, block: Block, link: Link) -> bytes:
        """The file of a block. Fields of another shape or dtype are a ValueError."""
        tensors: dict[str, Tensor] = {}
        for name, sites in self._packed.items():
            tensors[name] = torch.cat([part.flatten() for part in _parts(block, sites)])
        for name, site in self._exact.items():
            if site in block.exact:
                kept = block.exact[site].detach().cpu()
                tensors[name] = (kept if kept.dtype == torch.uint8 else kept.to(self.dtype)).contiguous()
        if self.sinks(link.number):
            sinks_2LSC = block.sinks_2LSC.detach().to("cpu", self.dtype).contiguous()
            tensors[SINKS] = sinks_stream(sinks_2LSC) if self.coded_sinks else sinks_2LSC
        for name, stream in self._streams.items():
            parts = _parts(block, stream.sites)
            tensors[name] = entropy.encode(parts, self._rungs) if name == CODED else lossless.encode(parts)
        about = _about(link)
        about["content"] = _content(about, tensors)
        return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})

    def from_bytes(self, data: bytes, link: Link) -> Block:
        """The block of a file, which has to be this one; raises ArtifactError, which begins with the check."""
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
        """The block of a file, whatever its place in a chain; the same checks."""
        head = header.read(io.BytesIO(data), len(data), _NAMES)
        link = _stated(head)
        if len(link.tokens) != self.recipe.window.block:
            raise ArtifactError(f"tokens: {len(link.tokens)} of them; a block has {self.recipe.window.block}")
        return link, self._read(data, head, link)

    def _read(self, data: bytes, head: header.Header, link: Link) -> Block:
        expected, listed = self.specs(link.number), head.specs()
        block, width = self.recipe.window.block, self.geometry.width
        few = {((width, size), torch.uint8) for size in sizes_beyond(block)}
        for name in self._exact.keys() & listed.keys():
            expected[name] = listed[name] if listed[name] in few else ((block, width), self.dtype)
        for name, longest in self.longest(link.number).items():
            shape, dtype = listed.get(name, ((), None))
            if dtype != torch.uint8 or len(shape) != 1 or shape[0] > longest:
                raise ArtifactError(f"tensors: {name} is not at most {longest} bytes of codes")
            expected[name] = listed[name]
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
        for name, sites in self._packed.items():
            for site, x in zip(sites, tensors[name].split([one.numbers for one in sites]), strict=True):
                fields[site.layer][site.role][site.field] = x.view(site.shape)
        for name, stream in self._streams.items():
            for site, x in zip(stream.sites, self._decoded(name, tensors[name]), strict=False):
                fields[site.layer][site.role][site.field] = x
        exact = {site: tensors[name] for name, site in self._exact.items() if name in tensors}
        for (layer, role), kept in exact.items():
            if not bool(torch.isfinite(decode_beyond(kept, block, self.dtype)).all()):
                raise ArtifactError(f"finite: {ROLES[role]}.{layer}.{EXACT} decodes to NaN or infinity")
        nothing = torch.empty(2, self.geometry.layers, 0, width, dtype=self.dtype)
        sinks_2LSC = tensors.get(SINKS, nothing)
        if SINKS in tensors and self.coded_sinks:
            places = 2 * self.geometry.layers * self.sinks(link.number)
            for x in self._without_loss(SINKS, sinks_2LSC, width, [places]):
                sinks_2LSC = x.mT.reshape(2, self.geometry.layers, -1, width)
        return Block(fields, sinks_2LSC, exact)

    def _decoded(self, name: str, stream_X: Tensor) -> list[Tensor]:
        """The fields of a stream; none where they are not decoded."""
        shapes = [(site.shape[0], site.shape[1]) for site in self._streams[name].sites]
        if name == CODED:
            return [] if self.tensors is None else entropy.decode(stream_X, shapes, self._rungs)
        return self._without_loss(name, stream_X, self.recipe.window.block, [width for _, width in shapes])

    def _without_loss(self, name: str, stream_X: Tensor, tokens: int, widths: Sequence[int]) -> list[Tensor]:
        """The numbers of such a stream, finite ones; none where the library is missing, and need not be there."""
        if self.tensors is None and not entropy.found():
            return []
        numbers = lossless.decode(stream_X, tokens, widths, self.dtype)
        if not all(bool(torch.isfinite(x).all()) for x in numbers):
            raise ArtifactError(f"finite: {name} has NaN or infinity")
        return numbers


def sinks_stream(sinks_2LSC: Tensor) -> Tensor:
    """Sinks coded without loss: a token of a layer is what a channel is to `lossless`, for tokens differ most."""
    return lossless.encode([sinks_2LSC.flatten(0, 2).mT])


def _parts(block: Block, sites: Sequence[_Site]) -> list[Tensor]:
    """The fields of a block, on the CPU; a ValueError for another shape or dtype than they have."""
    parts = [block.fields[site.layer][site.role][site.field].detach().cpu() for site in sites]
    for part, site in zip(parts, sites, strict=True):
        if tuple(part.shape) != site.shape or part.dtype != site.dtype:
            raise ValueError(
                f"{ROLES[site.role]}.{site.layer}.{site.field}: {_name(part.dtype)} {list(part.shape)}; the recipe "
                f"stores {_name(site.dtype)} {list(site.shape)}"
            )
    return parts


def beside(recipe: Recipe, geometry: Geometry, tokens: int = LENGTH) -> float:
    """Bits per element of a prefix's keys and values that files of an entropy-coded recipe hold beside codes.

    Exact sinks count in 16 bits, whatever the model's dtype; the frame of a block is its header: token ids, names,
    digests. The longer a prefix, rounded up to whole blocks, the less sinks take: bits in a recipe's name are those of
    LENGTH tokens. What a fit gives, the probabilities of codes among it, lies in the artifact, once for all prefixes,
    and is not counted: no recipe's is.
    """
    block = recipe.window.block
    kept, elements = -(-tokens // block) * block, 2 * geometry.layers * geometry.width
    return 16 * recipe.window.sinks / kept + 8 * frame(block) / (block * elements)


def frame(block: int) -> int:
    """Bytes of a file of so many tokens whose fields are coded, but for codes and sinks: about, for a token's id has
    more digits than four, or fewer."""
    digest, nothing = "0" * 64, {CODED: torch.empty(0, dtype=torch.uint8)}
    about = _about(Link(digest, digest, 1, (9999,) * block)) | {"content": digest}
    return len(safetensors.torch.save(nothing, {"kvq": strict_json.dumps(about)})) + entropy.HEADER


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
    digest = sha256(strict_json.dumps(dict(about)).encode())
    for name in sorted(tensors):
        digest.update(f"\0{name}\0".encode())
        digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
