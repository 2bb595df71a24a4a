"""Bring the serde `kvq` into LMCache: its server imports this module for an adapter of the type "plugin".

    {"type": "plugin", "module_path": "kvq_runtime.lmcache.plugin", "class_name": "Adapter",
     "adapter_params": {"type": "fs", "base_path": "/cache"},
     "serde": {"type": "kvq", "cache": "lloyd-3bit", "model": "Qwen/Qwen2.5-7B"}}

`adapter_params` is any adapter of LMCache's, which is made as it stands: the plugin is how a module comes in before the
serde of an adapter is looked up by name. A chunk that cannot be read is removed from the adapter, since LMCache
keeps what it has under a key: so the next request writes it again.

Pinned to LMCache 0.5.6.
"""

import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from lmcache import torch_device_type  # type: ignore[attr-defined]
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface, create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import PersistConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from kvq_runtime.engines import source
from kvq_runtime.errors import ArtifactError
from kvq_runtime.lmcache import chunk
from kvq_runtime.lmcache.chunk import ChunkCodec, Chunks

NAME = "kvq"
logger = init_logger("lmcache.kvq")
_said: set[str] = set()
_made = threading.local()  # `last`: the adapter whose serde LMCache makes next, in the same thread


class Adapter(L2AdapterInterface):
    """An adapter of LMCache's own, by its settings; no object of this class is ever made."""

    def __new__(cls, adapter_params: dict[str, Any], l1_memory_desc: Any = None) -> L2AdapterInterface:  # type: ignore[misc]
        kind = adapter_params.get("type")
        if not isinstance(kind, str) or kind == "plugin":
            raise ValueError('adapter_params of kvq\'s plugin: give the adapter that stores, {"type": "fs", ...}')
        config = get_l2_adapter_config_class(kind).from_dict(adapter_params)
        config.persist_config = PersistConfig(bool(adapter_params.get("persist_enabled", True)))
        made = create_l2_adapter(config, l1_memory_desc)
        _made.last = weakref.ref(made)
        return made


class KVQSerializer(Serializer):
    """Chunks into bytes."""

    def __init__(self, chunks: Chunks):
        self.chunks = chunks

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        room = _tensor(dst).view(-1)
        try:
            given = _tensor(src)
            return _codec(self.chunks, given, key).encode(given, key_bytes(key), room)
        except ValueError as error:
            _say(f"{error}; such chunks are not kept")
            raise

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """The bytes of a chunk; of a refused one its own: LMCache reports errors of `serialize` alone."""
        shapes, dtypes = layout_desc.shapes, layout_desc.dtypes
        try:
            if len(shapes) == 1:
                return self.chunks.codec(tuple(shapes[0]), dtypes[0]).bytes
        except ValueError as error:
            _say(f"{error}; such chunks are not kept")
        return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


class KVQDeserializer(Deserializer):
    """Bytes into chunks; bytes that are not the chunk's are an error, which LMCache takes for a miss.

    adapter   that has the bytes, and gives up those that are none
    """

    def __init__(self, chunks: Chunks, adapter: Callable[[], L2AdapterInterface | None]):
        self.chunks, self.adapter = chunks, adapter

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        data, out = _tensor(src), _tensor(dst)
        codec = _codec(self.chunks, out, key)
        try:
            codec.decode(data, key_bytes(key), out)
        except ArtifactError as error:
            adapter = self.adapter()
            if adapter is not None:
                adapter.delete([key])
            raise ArtifactError(f"chunk {key.chunk_hash.hex()} of {key.model_name}: {error}") from None


def key_bytes(key: ObjectKey) -> bytes:
    """Return the key of a chunk as bytes, which its digest covers."""
    parts = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt]
    return json.dumps(parts).encode()


def build(given: dict[str, object]) -> SerdeProcessor:
    """The serde of these settings (`kvq_runtime/lmcache/chunk.py`). Raises what `chunk.read_settings` does."""
    found = chunk.read_settings(given)
    recipe = found.source.recipe
    bits = source.bits(recipe, found.geometry or chunk.typical(found.head_size))
    logger.info("kvq: %s, %.4g bits per element", recipe.name, bits)
    if torch_device_type == "cpu":
        _say(
            "no GPU here; vLLM on a CPU has pages in an order that LMCache takes for another: a recipe by channel or "
            "an artifact is wrong for it, and any other loses more than it states"
        )
    chunks, adapter = Chunks(found), _made.__dict__.pop("last", lambda: None)
    return AsyncSerdeProcessor(KVQSerializer(chunks), KVQDeserializer(chunks, adapter), max_workers=found.workers)


def _codec(chunks: Chunks, tensor: torch.Tensor, key: ObjectKey) -> ChunkCodec:
    """The codec of this worker's chunks; a key's rank holds how many workers there are, and which this one is."""
    ranks, rank = key.kv_rank >> 24 & 0xFF, key.kv_rank >> 16 & 0xFF
    return chunks.codec(tuple(tensor.shape), tensor.dtype, rank, ranks or None)


def _say(text: str) -> None:
    """Warn once: LMCache repeats its own line, with a traceback, for each chunk that fails."""
    if text not in _said:
        _said.add(text)
        logger.warning("kvq: %s", text)


def _tensor(held: MemoryObj) -> torch.Tensor:
    tensor = held.tensor
    if tensor is None:
        raise ValueError("kvq keeps chunks of one tensor; this one has several, or none")
    return tensor


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, build)
