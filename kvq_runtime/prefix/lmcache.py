"""Bring the serde `kvq` into LMCache: its server imports this module for an adapter of the type "plugin".

A plugin (docs/prefix.md has the command) is imported before LMCache looks up the adapter's serde by name. A serde does
not know where in its text a chunk begins. LMCache's server publishes it on its event bus before a chunk is written: for
every prompt that is looked up and, where the server moves chunks itself, for each stored chunk, by the first worker,
which may come after another.

Pinned to LMCache 0.5.6.
"""

import json
import re
import threading
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
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import get_event_bus

from kvq_runtime.errors import ArtifactError
from kvq_runtime.prefix.lmcache_chunk import ChunkCodec, ChunkCodecs, read_settings
from kvq_runtime.store.memory import asymptotic_bits

NAME = "kvq"
MAX_STARTS = 1 << 16  # chunks whose places are remembered
DELAY, PATIENCE = 0.05, 1.0  # seconds that the event bus, and the first worker, may be late
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


class ChunkStarts:
    """The places of chunks in their texts, from LMCache's event bus. Raises ValueError where there is none."""

    def __init__(self) -> None:
        self._starts: dict[bytes, int] = {}
        self._added, self._patience = threading.Condition(), DELAY
        bus = get_event_bus()
        if not bus.enabled:
            raise ValueError(
                'serde "kvq": the recipe depends on where chunks begin, which the server publishes on its event bus; '
                "start it without --disable-observability"
            )
        bus.subscribe(EventType.MP_TOKENS, self._add)
        bus.subscribe(EventType.MP_LOOKUP, self._add)

    def start(self, chunk_hash: bytes) -> int:
        """Return the place of a chunk's first token. Raises ValueError for an unknown chunk."""
        with self._added:
            if not self._added.wait_for(lambda: chunk_hash in self._starts, self._patience):
                raise ValueError("a chunk of which LMCache does not say where it begins")
            return self._starts[chunk_hash]

    def _add(self, event: Event) -> None:
        hashes, starts = event.metadata["chunk_hashes"], event.metadata.get("token_offsets")
        if starts is None:  # of a prompt that is looked up
            starts = [number * event.metadata["chunk_size"] for number in range(len(hashes))]
        else:
            self._patience = PATIENCE
        with self._added:
            for chunk_hash, start in zip(hashes, starts, strict=True):
                self._starts.pop(chunk_hash, None)
                self._starts[chunk_hash] = start  # the newest
            while len(self._starts) > MAX_STARTS:
                del self._starts[next(iter(self._starts))]
            self._added.notify_all()


class KVQSerializer(Serializer):
    """Chunks into bytes, none for a chunk that cannot be kept.

    starts   places of chunks, of a recipe that depends on them
    """

    def __init__(self, codecs: ChunkCodecs, starts: ChunkStarts | None):
        self.codecs, self.starts = codecs, starts

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        assert src.tensor is not None and dst.tensor is not None
        try:
            start = 0 if self.starts is None else self.starts.start(key.chunk_hash)
            codec = _codec(self.codecs, src.tensor, key)
            codec.encode(src.tensor, key_bytes(key), dst.tensor.view(-1)[: codec.bytes], start)
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
    """The bytes of a load into its chunks; LMCache takes an error for a miss of all of them.

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
    """LMCache's, with all chunks of a load as one object: a task ends at the first object that fails."""

    def submit_deserialize(
        self, src_objs: list[MemoryObj], dst_objs: list[MemoryObj], keys: list[ObjectKey]
    ) -> SerdeTaskId:
        return super().submit_deserialize([src_objs], [dst_objs], [keys])  # type: ignore[list-item]


def key_bytes(key: ObjectKey) -> bytes:
    """Return the key of a chunk as bytes, which its digest covers."""
    parts = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt]
    return json.dumps(parts).encode()


def build(options: dict[str, object]) -> SerdeProcessor:
    """Make the serde of these settings. Raises what `read_settings` raises, and ValueError for a recipe that depends on
    positions where the server does not publish them."""
    codecs = read_settings(options)
    recipe = codecs.served.recipe
    logger.info("kvq: %s, %.4g bits per element", recipe.name, asymptotic_bits(recipe, codecs.geometry))
    if torch_device_type == "cpu":
        _warn_once("no GPU here; LMCache misreads the pages of vLLM on a CPU, and results are wrong (docs/prefix.md)")
    starts = ChunkStarts() if "positions" in recipe.needs else None
    return Processor(KVQSerializer(codecs, starts), KVQDeserializer(codecs))


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
