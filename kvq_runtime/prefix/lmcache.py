"""Bring the serde `kvq` into LMCache: its server imports this module for an adapter of the type "plugin".

A plugin (docs/prefix.md has the command) is imported before LMCache looks up the adapter's serde by name.
Pinned to LMCache 0.5.6.
"""

import json
import re
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lmcache import torch_device_type  # type: ignore[attr-defined]
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.config import PersistConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    SerdeTaskId,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from kvq_runtime.errors import ArtifactError
from kvq_runtime.prefix.lmcache_chunk import ChunkCodec, ChunkCodecs, read_settings
from kvq_runtime.store.memory import asymptotic_bits

NAME = "kvq"
logger = init_logger("lmcache.kvq")
_warned: set[str] = set()


class Adapter(FSL2Adapter):
    """LMCache's adapter of files, by its own parameters.

    LMCache stores the chunks of several requests as one task, which ends at the first that fails. So a chunk that
    cannot be kept is empty, and is skipped here.
    """

    made: ClassVar[weakref.WeakSet["Adapter"]] = weakref.WeakSet()

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: Any = None):
        if adapter_params.get("type") != "fs":
            raise ValueError('adapter_params of kvq\'s plugin: give {"type": "fs", "base_path": ...}')
        config: Any = get_l2_adapter_config_class("fs").from_dict(adapter_params)
        config.persist_config = PersistConfig(bool(adapter_params.get("persist_enabled", True)))
        super().__init__(config)
        Adapter.made.add(self)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        kept = [(key, memory) for key, memory in zip(keys, objects, strict=True) if memory.get_size()]
        return super().submit_store_task([key for key, _ in kept], [memory for _, memory in kept])


class KVQSerializer(Serializer):
    """Encoder of chunks into bytes, none for a chunk that cannot be kept."""

    def __init__(self, codecs: ChunkCodecs):
        self.codecs = codecs

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        assert src.tensor is not None and dst.tensor is not None
        try:
            codec = _codec(self.codecs, src.tensor, key)
            codec.encode(src.tensor, key_bytes(key), dst.tensor.view(-1)[: codec.bytes])
            return codec.bytes
        except ValueError as error:
            _warn_once(f"{error}; such chunks are not kept")
            return 0

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the bytes of a chunk; of a refused one its own: LMCache reports errors of `serialize` alone."""
        (shape,), (dtype,) = layout_desc.shapes, layout_desc.dtypes  # several only of layers of several kinds
        try:
            return self.codecs.codec(tuple(shape), dtype).bytes
        except ValueError as error:
            _warn_once(f"{error}; such chunks are not kept")
            return shape.numel() * dtype.itemsize


class KVQDeserializer(Deserializer):
    """Decoder of a load's bytes into its chunks; LMCache takes an error for a miss of all of them.

    LMCache keeps what it has under a key, so bytes that cannot be read are deleted: the next request writes them again.
    """

    def __init__(self, codecs: ChunkCodecs):
        self.codecs = codecs

    def deserialize(  # type: ignore[override]
        self, src: Sequence[MemoryObj], dst: Sequence[MemoryObj], key: Sequence[ObjectKey]
    ) -> None:
        faults: dict[ObjectKey, ArtifactError] = {}
        for data, out, name in zip(src, dst, key, strict=True):
            assert data.tensor is not None and out.tensor is not None
            try:
                _codec(self.codecs, out.tensor, name).decode(data.tensor, key_bytes(name), out.tensor)
            except ArtifactError as error:
                faults[name] = error
        if faults:
            for adapter in Adapter.made:
                adapter.delete([*faults])
            raise ArtifactError(f"{len(faults)} of {len(key)} chunks; the first: {next(iter(faults.values()))}")


class Processor(AsyncSerdeProcessor):
    """LMCache's processor, with all chunks of a load as one object: a task ends at the first object that fails."""

    def submit_deserialize(
        self, src_objs: list[MemoryObj], dst_objs: list[MemoryObj], keys: list[ObjectKey]
    ) -> SerdeTaskId:
        return super().submit_deserialize([src_objs], [dst_objs], [keys])  # type: ignore[list-item]


def key_bytes(key: ObjectKey) -> bytes:
    """Return the key of a chunk as bytes, which its digest covers."""
    parts = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt]
    return json.dumps(parts).encode()


def build(options: dict[str, object]) -> SerdeProcessor:
    """Make the serde of these settings. Raises as `read_settings` does."""
    codecs = read_settings(options)
    recipe = codecs.served.recipe
    logger.info("kvq: %s, %.4g bits per element", recipe.name, asymptotic_bits(recipe, codecs.geometry))
    if torch_device_type == "cpu":
        _warn_once("no GPU here; LMCache misreads the pages of vLLM on a CPU, and results are wrong (docs/prefix.md)")
    return Processor(KVQSerializer(codecs), KVQDeserializer(codecs))


def _codec(codecs: ChunkCodecs, tensor: torch.Tensor, key: ObjectKey) -> ChunkCodec:
    """Return the codec of this worker's chunks; a key's rank holds the number of workers, and that of this one."""
    ranks, rank = key.kv_rank >> 24 & 0xFF, key.kv_rank >> 16 & 0xFF
    return codecs.codec(tuple(tensor.shape), tensor.dtype, rank, ranks or None)


def _warn_once(text: str) -> None:
    """Warn once of texts that differ by numbers alone: LMCache repeats its own line for each task that fails."""
    kind = re.sub(r"\d+", "", text)
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("kvq: %s", text)


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, build)
