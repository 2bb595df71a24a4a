"""Read the settings of LMCache's serde `kvq`, refuse a recipe that cannot keep its chunks, and find their codecs.

{"type": "kvq", "cache": "lloyd-3bit", "model": "Qwen/Qwen2.5-7B"}

cache      recipe, artifact or lock file: `kvq_runtime/engines/source.py`
model      folder, or id on a Hub, of the served model; its files are on this machine, config.json at least
revision   of a model on a Hub
head_size  in place of `model`, of a recipe without artifact: elements of a head. vLLM's chunks need `model`
workers    threads that code chunks, 1 by default

A chunk is keys (after RoPE) and values of all layers of some tokens in a row, and is stored and found as a whole: what
needs whole blocks can be served, unlike in vLLM's pages. But LMCache tells of a chunk its hash alone, not where in the
text it is.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.engines import source
from kvq_runtime.engines.source import Engine, Source
from kvq_runtime.errors import named
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.lmcache import chunk
from kvq_runtime.lmcache.chunk import ChunkCodec
from kvq_runtime.recipe import Recipe

NAMES = ("cache", "model", "revision", "head_size", "workers")


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
def read(given: Mapping[str, Any]) -> Settings:
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
        """The codec of chunks of this worker (`chunk.py`). Raises ValueError for chunks that the recipe cannot keep.

        rank, ranks   the worker's number and the number of workers; None: it follows from the chunk's channels
        """
        asked = (*shape, dtype, rank, ranks)
        with self._lock:
            if asked not in self._made:
                _, layers, tokens, width = chunk.apart(shape, self.settings.head_size)
                if self.settings.geometry is None and chunk.fused(shape):
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
