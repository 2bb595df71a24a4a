"""Turn a chunk, keys and values of all layers of some tokens, into bytes, and the bytes into a chunk.

    | "kvqchunk" 8 | version 4 | zero 4 | made by 16 | sha256 32 | the fields of all layers, wide elements first |

The fields are those that the recipe's codecs give for the chunk's blocks, nothing beside them: after the 64 bytes
of the header a chunk holds the bits that the recipe states. Their number follows from the chunk's shape, so that it is
known ahead. `made by` is a digest of all that decides how numbers become bytes; the sha256 is of the chunk's key,
everything before it and everything after it. So a chunk that was changed, moved to another key, or written by another
recipe, artifact or shape is an ArtifactError, and nothing is decoded.

A chunk is keys and values of all layers, [2, L, T, C]; LMCache has it in one of these layouts, all read and written
where they are:

    [2, L, T, C]                   engines that hold keys and values apart
    [L, T, 2C] or [1, L, T, 2C]    those that hold them fused, as vLLM does: each head's key, then its value;
                                   the first where the engine moves chunks, the second where LMCache's server does

Latent attention (MLA) has one row a token too, and its shape may be that of fused heads: a model's configuration tells
them apart, a chunk does not. Source: `compute_kv_layout` and `get_kernel_group_shape_dtype` of LMCache 0.5.6.

A chunk is stored and found as a whole: what needs whole blocks can be served, unlike in vLLM's pages. But LMCache tells
of it its hash alone, not where in the text it is. LMCache's serde `kvq` has the settings

    {"type": "kvq", "cache": "lloyd-3bit", "model": "Qwen/Qwen2.5-7B"}

cache      recipe, artifact or lock file: `kvq_runtime/engines/source.py`
model      folder, or id on a Hub, of the served model; its files are on this machine, config.json at least
revision   of a model on a Hub
head_size  in place of `model`, of a recipe without artifact: elements of a head. vLLM's chunks need `model`
workers    threads that code chunks, 1 by default

N = blocks of a chunk · T tokens of a block · X bytes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.disk import strict_json
from kvq_runtime.engines import source
from kvq_runtime.engines.fields import Field, laid_out
from kvq_runtime.engines.source import Engine, Source
from kvq_runtime.errors import ArtifactError, named
from kvq_runtime.geometry import MODELS, ROLES, Geometry
from kvq_runtime.prefix import chain
from kvq_runtime.recipe import Recipe

HEADER = 64
WIDEST = 8  # bytes of an element
_MAGIC = b"kvqchunk" + (1).to_bytes(4, "little") + bytes(4)
_MADE_BY = slice(16, 32)
_SUM = slice(32, 64)
NAMES = ("cache", "model", "revision", "head_size", "workers")


class ChunkCodec:
    """Encode and decode chunks of one shape.

    recipe    that LMCache's chunks can be kept by (`settings.LMCACHE`)
    tensors   of its fit, {} where there is none
    tokens    of a chunk
    dtype     of its keys and values
    Raises ValueError if the recipe cannot encode that number of tokens.
    """

    def __init__(
        self, recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor], tokens: int, dtype: torch.dtype
    ):
        self.recipe, self.geometry = cut(recipe, tokens).check(geometry), geometry
        self.dtype, self.shape_2LTC = dtype, (2, geometry.layers, tokens, geometry.width)
        self._codecs = shared.build(self.recipe, geometry, tensors)
        self._fields = laid_out(_fields(self.recipe, geometry, tokens // self.recipe.window.block, dtype), HEADER)
        self.bytes = self._fields[-1].stop  # of an encoded chunk
        self._made_by = _digest(self.recipe, tensors, self.shape_2LTC, dtype)

    def encode(self, chunk: Tensor, key: bytes, out_X: Tensor) -> int:
        """Write a chunk into uint8 memory on the CPU; the bytes written. ValueError: NaN or infinity, another shape."""
        x_2LTHD = self._by_head(chunk)
        if out_X.numel() < self.bytes:
            raise ValueError(f"{out_X.numel()} bytes for a chunk that takes {self.bytes}")
        if not bool(torch.isfinite(chunk).all()):
            raise ValueError("NaN or infinity among the keys or values; nothing is kept of the chunk")
        block = self.recipe.window.block
        encoded = {
            (layer, role): codec.encode(x_2LTHD[role, layer].flatten(1).unflatten(0, (-1, block)), Context())
            for layer, role, codec in self._each()
        }
        for field in self._fields:
            part = encoded[field.layer, field.role][field.name]
            if part.shape != field.shape or part.dtype != field.dtype:
                raise RuntimeError(f"{field.name}: {part.dtype} {list(part.shape)}, stated {field.dtype} {field.shape}")
            out_X[field.start : field.stop] = part.contiguous().view(-1).view(torch.uint8)
        header = _MAGIC + self._made_by
        out_X[: _SUM.start] = _bytes(header)
        out_X[_SUM] = _bytes(_sum(header, key, out_X[HEADER : self.bytes]))
        return self.bytes

    def decode(self, data_X: Tensor, key: bytes, out: Tensor) -> None:
        """Read a chunk from uint8 memory on the CPU. ArtifactError, before anything is written, unless it is this one.

        data_X   may be longer than the chunk
        """
        out_2LTHD = self._by_head(out)
        data_X = data_X.contiguous().view(-1)
        if data_X.numel() < self.bytes:
            raise ArtifactError(f"size: {data_X.numel()} bytes of a chunk that takes {self.bytes}; it was cut off")
        data_X = data_X[: self.bytes]
        if data_X.storage_offset() % WIDEST:
            data_X = data_X.clone()  # so that a field may begin where it does
        header = data_X[: _SUM.start].numpy().tobytes()
        if header[: _MADE_BY.start] != _MAGIC:
            raise ArtifactError("header: this is no chunk of kvq's, or one of another version; it is computed again")
        if header[_MADE_BY] != self._made_by:
            raise ArtifactError("made by: another recipe, artifact or shape wrote this chunk; it is computed again")
        if data_X[_SUM].numpy().tobytes() != _sum(header, key, data_X[HEADER:]):
            raise ArtifactError("sha256: the chunk was damaged, or is of another key; it is computed again")
        parts: dict[tuple[int, int], dict[str, Tensor]] = {}
        for field in self._fields:
            part = field.of(data_X)
            if field.dtype.is_floating_point and not bool(torch.isfinite(part).all()):
                text = f"finite: {field.name} of layer {field.layer} has NaN or infinity; the chunk is computed again"
                raise ArtifactError(text)
            parts.setdefault((field.layer, field.role), {})[field.name] = part
        found: dict[tuple[int, int], Tensor] = {}
        for layer, role, codec in self._each():
            x_NTC = codec.restore(codec.decode(parts[layer, role], Context()), Context())
            found[role, layer] = x_NTC.flatten(0, 1).to(self.dtype)
            if not bool(torch.isfinite(found[role, layer]).all()):  # a large scale overflows, above all in float16
                raise ArtifactError(f"finite: layer {layer} decodes to NaN or infinity; the chunk is computed again")
        for place, x_TC in found.items():
            out_2LTHD[place] = x_TC.unflatten(-1, out_2LTHD.shape[-2:])

    def _each(self):
        for layer, pair in enumerate(self._codecs):
            for role, codec in enumerate(pair):
                assert isinstance(codec, Codec)
                yield layer, role, codec

    def _by_head(self, chunk: Tensor) -> Tensor:
        """A view of a chunk in any layout, [2, L, T, H, D]. ValueError for another shape or dtype."""
        size, same = self.geometry.head_size, chunk.dtype == self.dtype
        if not same or apart(chunk.shape, size) != self.shape_2LTC:
            raise ValueError(
                f"a chunk of {chunk.dtype} {list(chunk.shape)} for a codec of {self.dtype} {list(self.shape_2LTC)}"
            )
        if not fused(chunk.shape):
            return chunk.unflatten(-1, (-1, size))
        rows_LTW = chunk[0] if chunk.dim() == 4 else chunk
        return torch.movedim(rows_LTW.unflatten(-1, (-1, 2, size)), -2, 0)


def cut(recipe: Recipe, tokens: int) -> Recipe:
    """The recipe with blocks that make up a chunk of `tokens` tokens: its own, or, if it rounds token by token, one.

    Raises ValueError if codes belong to a block and the chunk is not whole blocks.
    """
    block = recipe.window.block
    if tokens % block == 0:
        return recipe
    if any(scheme.axis == "channel" or scheme.correct is not None for scheme in recipe.schemes):
        raise ValueError(
            f"{recipe.name} encodes blocks of {block} tokens, and a chunk has {tokens}; "
            f"give LMCache's server a --chunk-size that {block} divides"
        )
    return replace(recipe, window=replace(recipe.window, block=tokens))


def fused(shape: Sequence[int]) -> bool:
    """True if chunks of this shape have one row per token, which may hold both keys and values."""
    return len(shape) == 3 or (len(shape) == 4 and shape[0] == 1)


def apart(shape: Sequence[int], size: int) -> tuple[int, int, int, int]:
    """(2, L, T, C) of a chunk, whose heads have `size` elements. ValueError: no such keys and values."""
    *planes, layers, tokens, width = shape if len(shape) in (3, 4) else (0, 0, 0, 0)
    if planes not in ([], [1], [2]):
        raise ValueError(
            f"a chunk of shape {list(shape)}; kvq keeps keys and values of attention, [2, layers, tokens, channels], "
            "or fused, [layers, tokens, heads · 2 · head size]"
        )
    channels, rest = (width // 2, width % (2 * size)) if fused(shape) else (width, width % size)
    if rest or not channels:
        kind = "fused keys and values" if fused(shape) else "keys and values"
        raise ValueError(
            f"a chunk of shape {list(shape)}; {width} is no number of {kind} of heads of {size} elements: the serde's "
            "model is another than the engine's, or its cache holds something else"
        )
    return 2, layers, tokens, channels


def _fields(recipe: Recipe, geometry: Geometry, blocks: int, dtype: torch.dtype) -> list[Field]:
    """The fields of all layers, [blocks, ...] each."""
    return [
        Field(layer, role, name, (blocks, *shape), kind)
        for layer in range(geometry.layers)
        for role, scheme in enumerate(recipe.at(layer))
        for name, (shape, kind) in scheme.fields(recipe.window.block, geometry, dtype).items()
    ]


def _digest(recipe: Recipe, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """16 bytes that two ways to make a chunk share only if they are the same."""
    stated = recipe.with_exact(sinks=0, recent=0).to_json()  # a chunk has neither
    made = {name: setting for name, setting in stated.items() if name not in ("name", "summary")}
    about = {"recipe": made, "shape": list(shape), "dtype": str(dtype), "roles": list(ROLES)}
    digest = sha256(strict_json.dumps(about).encode())
    chain.add_tensors(digest, tensors)
    return digest.digest()[:16]


def _sum(header: bytes, key: bytes, data_X: Tensor) -> bytes:
    digest = sha256(len(key).to_bytes(8, "little") + key + header)
    digest.update(data_X.numpy().data)
    return digest.digest()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _reason(recipe: Recipe) -> str | None:
    if recipe.position == "pre":
        return "keys are encoded before RoPE, and LMCache does not say at which position a chunk begins"
    if "positions" in recipe.needs:
        return "the keys' mean turns with the position, and LMCache does not say at which one a chunk begins"
    if recipe.cross_layer:
        return "each layer is predicted from the decoded layer below, and a chunk's layers are kept by themselves"
    return None


LMCACHE = Engine("LMCache's chunks cannot be kept by", "keep them by", "LMCache decides which chunks are held", _reason)


@dataclass(frozen=True)
class Settings:
    """Settings of the serde.

    geometry   of the model, None where only `head_size` is known
    """

    source: Source
    geometry: Geometry | None
    head_size: int
    workers: int


@named('serde "kvq"')
def read_settings(given: Mapping[str, Any]) -> Settings:
    """Load and check what the settings name. Raises ValueError, ArtifactError, NotFound, OSError, RuntimeError, whose
    messages begin with the serde's name."""
    unknown = sorted(set(given) - set(NAMES))
    if unknown:
        raise ValueError(f"unknown settings {unknown}; there are {', '.join(NAMES)}")
    for name in ("cache", "model", "revision"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{name}={given[name]!r:.80}; give text")
    for name in ("head_size", "workers"):
        if type(given.get(name, 1)) is not int or given.get(name, 1) < 1:
            raise ValueError(f"{name}={given[name]!r:.80}; give a whole number of at least 1")
    if "cache" not in given:
        raise ValueError('give "cache": a recipe, an artifact or a lock file')
    if ("model" in given) == ("head_size" in given):
        raise ValueError('give "model", a folder or an id, or for a recipe without artifact "head_size"; one of them')
    found = source.read(given["cache"])
    geometry = None
    if "model" in given:
        config = source.config(given["model"], given.get("revision"))
        geometry = source.match(found, config, given["model"], given.get("revision"))
        head_size = geometry.head_size
    elif found.artifact is not None:
        raise ValueError('an artifact is of one model; give "model", so that it can be compared')
    else:
        head_size = given["head_size"]
    LMCACHE.check(found.recipe, geometry or typical(head_size))
    return Settings(found, geometry, head_size, given.get("workers", 1))


def typical(head_size: int) -> Geometry:
    """A model's shape where no model is named: what is asked of it is asked again of each chunk's."""
    return replace(MODELS["qwen2.5-7b"], head_size=head_size)


class Chunks:
    """The codecs of all shapes of chunks that come."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._lock = threading.Lock()
        self._made: dict[tuple, ChunkCodec] = {}

    def codec(self, shape: Sequence[int], dtype: torch.dtype, rank: int = 0, ranks: int | None = None) -> ChunkCodec:
        """The codec of chunks of this worker. Raises ValueError for chunks that the recipe cannot keep.

        rank, ranks   the worker's number and the number of workers; None: it follows from the chunk's channels
        """
        asked = (*shape, dtype, rank, ranks)
        with self._lock:
            if asked not in self._made:
                _, layers, tokens, width = apart(shape, self.settings.head_size)
                if self.settings.geometry is None and fused(shape):
                    raise ValueError(
                        f"a chunk of shape {list(shape)}: fused keys and values, or latents (MLA), which head_size "
                        'does not tell apart; give the serde "model" in its place'
                    )
                geometry, tensors = self._part(layers, width, rank, ranks)
                self._made[asked] = ChunkCodec(self.settings.source.recipe, geometry, tensors, tokens, dtype)
            return self._made[asked]

    def _part(self, layers: int, width: int, rank: int, ranks: int | None) -> tuple[Geometry, Mapping[str, Tensor]]:
        """The geometry of a worker's chunk, and its heads' fit.

        width   of its keys, C
        """
        found, whole, size = self.settings.source, self.settings.geometry, self.settings.head_size
        if whole is not None and (whole.width % width or layers > whole.layers):
            raise ValueError(f"a chunk of {layers} layers and {width} channels; the model has {whole}")
        if whole is not None and layers < whole.layers and (found.artifact is not None or found.recipe.layers):
            raise ValueError(
                f"a chunk of {layers} layers of a model with {whole.layers}, and LMCache does not say which; without "
                "pipeline parallelism, or with a recipe that treats all layers alike, it can be kept"
            )
        own = Geometry(layers, width // size, size)
        if whole is None or layers < whole.layers:
            return own, found.tensors
        share = source.share_of(whole, rank, ranks or whole.width // width)
        if source.narrower(whole, share) != own:
            raise ValueError(
                f"a chunk of {own.kv_heads} heads where {share.parts} workers have "
                f"{source.narrower(whole, share).kv_heads} each"
            )
        return (own, {}) if found.artifact is None else source.narrowed(found.recipe, whole, found.tensors, share)
