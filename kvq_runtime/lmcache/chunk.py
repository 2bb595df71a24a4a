"""Turn a chunk, keys and values of all layers of some tokens, into bytes, and the bytes into a chunk.

    | "kvqchunk" 8 | version 4 | number of the first block 4 | bytes of each block's file 4 · N | files of blocks |

A chunk is the blocks of a prefix in a row, each as the file that a `PrefixStore` keeps of it (`prefix/block_file.py`):
the same codecs, exact sinks and checks. In the place of a chain's root
stands a digest of all that decides how numbers become bytes, in that of the name before a sha256 of the chunk's key. So
a chunk that was changed, moved to another key, or written by another recipe, artifact or shape is an ArtifactError, and
nothing is decoded.

The number of a block tells where it is in its text. A recipe that needs that, since RoPE is undone or turns a mean, is
told (`plugin.py`), and keeps the text's first tokens exact; by all others a chunk is encoded as if it were the first,
without sinks. All chunks of a shape take as many bytes: shorter ones are padded.

A chunk is keys and values of all layers, [2, L, T, C]; LMCache has it in one of these layouts, all read and written
where they are:

    [2, L, T, C]                   engines that hold keys and values apart
    [L, T, 2C] or [1, L, T, 2C]    those that hold them fused, as vLLM does: each head's key, then its value;
                                   the first where the engine moves chunks, the second where LMCache's server does

Latent attention (MLA) has one row a token too, and its shape may be that of fused heads: a model's configuration tells
them apart, a chunk does not. Source: `compute_kv_layout` and `get_kernel_group_shape_dtype` of LMCache 0.5.6.

LMCache's serde `kvq` has the settings

    {"type": "kvq", "cache": "lloyd-3bit", "model": "Qwen/Qwen2.5-7B"}

cache      recipe, artifact or lock file: `kvq_runtime/engines/served_recipe.py`
model      folder, or id on a Hub, of the served model; its files are on this machine, config.json at least
revision   of a model on a Hub
head_size  in place of `model`, of a recipe without artifact: elements of a head. vLLM's chunks need `model`
workers    threads that code chunks, 1 by default

N = blocks of a chunk · T tokens of a chunk · X bytes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.engines import served_recipe
from kvq_runtime.engines.served_recipe import Engine, Source
from kvq_runtime.errors import ArtifactError, named
from kvq_runtime.geometry import MODELS, Geometry, Sliding
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import block_file, chain
from kvq_runtime.prefix.block_codec import BlockCodec
from kvq_runtime.prefix.block_file import Block, BlockFormat, Link
from kvq_runtime.recipe import Recipe

_MAGIC = b"kvqchunk" + (1).to_bytes(4, "little")
NAMES = ("cache", "model", "revision", "head_size", "workers")


class ChunkCodec:
    """Encode and decode chunks of one shape.

    tensors    of the recipe's fit, {} where there is none
    tokens     of a chunk
    dtype      of its keys and values
    rotary     the model's rotation, where the recipe needs positions
    Raises ValueError if the recipe cannot encode that number of tokens.
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        tokens: int,
        dtype: torch.dtype,
        rotary: Rotary | None = None,
    ):
        recipe = cut(recipe, tokens)
        if "positions" not in recipe.needs:
            recipe = recipe.with_exact(sinks=0)
        self.codec = BlockCodec(recipe, geometry, tensors, rotary)
        self.recipe, self.geometry, self.dtype = recipe, geometry, dtype
        self.format = BlockFormat(recipe, geometry, dtype)
        self.shape_2LTC = (2, geometry.layers, tokens, geometry.width)
        self._count = tokens // recipe.window.block
        self._root = chain.root(block_file.digest(self.format.describe("", tensors)), "")
        last = (1 << 31) - 1 - self._count  # the number of a block with the longest header
        ends = zip(self._links(b"", 0), self._links(b"", last), strict=True)
        sizes = [max(map(self.format.file_bytes, pair)) for pair in ends]
        self.bytes = self._header + sum(sizes)

    @property
    def _header(self) -> int:
        return len(_MAGIC) + 4 * (1 + self._count)

    def _links(self, key: bytes, first: int) -> list[Link]:
        """The places of a chunk's blocks in a text."""
        previous = sha256(key).hexdigest()
        return [Link(self._root, previous, first + place, ()) for place in range(self._count)]

    def encode(self, chunk: Tensor, key: bytes, out_X: Tensor, start: int = 0) -> None:
        """Write a chunk into uint8 memory on the CPU, `bytes` of it.

        start   its first token's place in the text, where the recipe needs positions; a multiple of the chunk's tokens
        Raises ValueError for NaN or infinity, and another shape.
        """
        first, rest = divmod(start, self.recipe.window.block)
        if rest:
            raise ValueError(f"start={start}; {self.recipe.name} encodes blocks of {self.recipe.window.block} tokens")
        pairs = enumerate(zip(*self._by_head(chunk).flatten(3), strict=True))
        blocks = self.codec.encode(first, dict(pairs))
        if len(blocks) < self._count:
            raise ValueError("NaN or infinity among the keys or values; nothing is kept of the chunk")
        data = self._framed(blocks, key, first)
        out_X[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        out_X[len(data) :] = 0

    def decode(self, data_X: Tensor, key: bytes, out: Tensor) -> None:
        """Read a chunk from uint8 memory on the CPU. ArtifactError, before anything is written, unless it is this one.

        data_X   may be longer than the chunk
        """
        out_2LTHD = self._by_head(out)
        data, found = data_X.contiguous().view(-1).numpy().data, dict[tuple[int, int], Tensor]()
        first, blocks = self._blocks(data, key)
        for layer, *pair in self.codec.decode(blocks, start=first * self.recipe.window.block):
            for role, x_THD in enumerate(pair):
                if not bool(x_THD.float().abs().amax().isfinite()):  # a large scale overflows, above all in float16
                    raise ArtifactError(
                        f"finite: layer {layer} decodes to NaN or infinity; the chunk is computed again"
                    )
                found[role, layer] = x_THD.clone()
        for place, x_THD in found.items():
            out_2LTHD[place] = x_THD

    def _framed(self, blocks: Sequence[Block], key: bytes, first: int) -> bytearray:
        """The bytes of a chunk."""
        places = zip(blocks, self._links(key, first), strict=True)
        files = [self.format.to_bytes(block, link) for block, link in places]
        numbers = [number.to_bytes(4, "little") for number in (first, *map(len, files))]
        return bytearray().join([_MAGIC, *numbers, *files])

    def _blocks(self, data: memoryview, key: bytes) -> tuple[int, list[Block]]:
        """The number of a chunk's first block, and its blocks, checked."""
        if len(data) < self._header or data[: len(_MAGIC)] != _MAGIC:
            raise ArtifactError("header: this is no chunk of kvq's, or one of another version; it is computed again")
        words = data[len(_MAGIC) : self._header]
        first, *sizes = (int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4))
        blocks, end = list[Block](), self._header
        for link, size in zip(self._links(key, first), sizes, strict=True):
            start, end = end, end + size
            if end > len(data):
                raise ArtifactError(f"size: {len(data)} bytes of a chunk that takes {end} or more; it was cut off")
            blocks.append(self.format.from_bytes(bytes(data[start:end]), link))
        return first, blocks

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


LMCACHE = Engine("LMCache's chunks cannot be kept by", "keep them by", "LMCache decides which chunks are held",
                 lambda _: None)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the serde.

    geometry   of the model's layers that attend to all tokens, None where only `head_size` is known
    rotary     its rotation, where the recipe needs positions
    sliding    how many of its layers slide; LMCache has chunks of these, and does not say which they are
    """

    source: Source
    geometry: Geometry | None
    head_size: int
    workers: int
    rotary: Rotary | None = None
    sliding: int = 0


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
    found = served_recipe.read(given["cache"])
    geometry, rotary, sliding = None, None, 0
    if "model" in given:
        config = served_recipe.config(given["model"], given.get("revision"))
        geometry = served_recipe.match(found, config, given["model"], given.get("revision"))
        head_size, sliding = geometry.head_size, Sliding.from_config(config).layers
    elif found.artifact is not None:
        raise ValueError('an artifact is of one model; give "model", so that it can be compared')
    else:
        head_size = given["head_size"]
    LMCACHE.check(found.recipe, geometry or typical(head_size))
    if sliding and (found.artifact is not None or found.recipe.layers or "positions" in found.recipe.needs):
        raise ValueError(
            f"{sliding} layers of {given['model']} slide, and LMCache does not say which layers a chunk is of; "
            f"{found.recipe.name} does not treat all alike, use a recipe that does, without artifact, as lloyd-3bit"
        )
    if "positions" in found.recipe.needs:
        if geometry is None:
            raise ValueError(f'{found.recipe.name} undoes RoPE; give "model" in the place of "head_size"')
        from kvq_runtime.hf.model import rotary_of_folder  # with transformers, which other recipes do without

        folder = served_recipe.folder(given["model"], given.get("revision")) or Path(given["model"])
        rotary = rotary_of_folder(folder, torch.bfloat16)
    return Settings(found, geometry, head_size, given.get("workers", 1), rotary, sliding)


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
                found, rotary = self.settings.source, self.settings.rotary
                self._made[asked] = ChunkCodec(
                    found.recipe, geometry, tensors, tokens, dtype, replace(rotary, dtype=dtype) if rotary else None,
                )  # fmt: skip
            return self._made[asked]

    def _part(self, layers: int, width: int, rank: int, ranks: int | None) -> tuple[Geometry, Mapping[str, Tensor]]:
        """The geometry of a worker's chunk, and its heads' fit.

        width   of its keys, C
        """
        found, whole, size = self.settings.source, self.settings.geometry, self.settings.head_size
        sliding = self.settings.sliding
        if whole is not None and (whole.width % width or layers > whole.layers + sliding):
            more = f", and {sliding} that slide" if sliding else ""
            raise ValueError(f"a chunk of {layers} layers and {width} channels; the model has {whole}{more}")
        if whole is not None and layers < whole.layers and (found.artifact is not None or found.recipe.layers):
            raise ValueError(
                f"a chunk of {layers} layers of a model with {whole.layers}, and LMCache does not say which; without "
                "pipeline parallelism, or with a recipe that treats all layers alike, it can be kept"
            )
        own = Geometry(layers, width // size, size)
        if whole is None or sliding or layers < whole.layers:
            return own, found.tensors
        share = served_recipe.share_of(whole, rank, ranks or whole.width // width)
        if served_recipe.narrower(whole, share) != own:
            raise ValueError(
                f"a chunk of {own.kv_heads} heads where {share.parts} workers have "
                f"{served_recipe.narrower(whole, share).kv_heads} each"
            )
        return (
            (own, {}) if found.artifact is None else served_recipe.narrowed(found.recipe, whole, found.tensors, share)
        )
