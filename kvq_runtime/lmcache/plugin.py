"""Bring the serde `kvq` into LMCache: its server imports this module for an adapter of the type "plugin".

    {"type": "plugin", "module_path": "kvq_runtime.lmcache.plugin", "class_name": "Adapter",
     "adapter_params": {"type": "fs", "base_path": "/cache"},
     "serde": {"type": "kvq", "cache": "lloyd-3bit", "model": "Qwen/Qwen2.5-7B"}}

`adapter_params` is any adapter of LMCache's, which is made as it stands: the plugin is how a module comes in before the
serde of an adapter is looked up by name. A chunk that cannot be read is removed from the adapter, since LMCache
keeps what it has under a key: so the next request writes it again.

LMCache stores and loads chunks of one or more requests as one task, and ends it at the first that fails. So that one
does not take the others with it, `Files` leaves out what cannot be kept, and a load goes on to its end, to remove every
chunk that cannot be read.

A serde is not told where in its text a chunk begins. LMCache's server is, and says so on its event bus before a chunk
is written: of all that a prompt is looked up for and, where it moves chunks itself, of each that is stored, by the
first worker, which may come after another.

Pinned to LMCache 0.5.6.
"""

import json
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lmcache import torch_device_type  # type: ignore[attr-defined]
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface, create_l2_adapter
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

from kvq_runtime.engines import served_recipe
from kvq_runtime.errors import ArtifactError
from kvq_runtime.lmcache import chunk
from kvq_runtime.lmcache.chunk import ChunkCodec, Chunks

NAME = "kvq"
HELD = 1 << 16  # starts of chunks that are held
DELAY, PATIENCE = 0.05, 1.0  # seconds that the event bus, and the first worker, may be late
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
        made = Files(config) if kind == "fs" else create_l2_adapter(config, l1_memory_desc)  # type: ignore[arg-type]
        _made.last = weakref.ref(made)
        return made


class Files(FSL2Adapter):
    """LMCache's adapter of files, that does not store what is empty."""

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        kept = [(key, held) for key, held in zip(keys, objects, strict=True) if held.get_size()]
        return super().submit_store_task([key for key, _ in kept], [held for _, held in kept])


class Starts:
    """Where in their texts chunks begin, by what LMCache's event bus says. Raises ValueError where there is none."""

    def __init__(self) -> None:
        self._told: dict[bytes, int] = {}
        self._more, self._patience = threading.Condition(), DELAY
        bus = get_event_bus()
        if not bus.enabled:
            raise ValueError(
                'serde "kvq": the recipe needs to know where chunks begin, which LMCache\'s server says on its event '
                "bus; start it without --disable-observability"
            )
        bus.subscribe(EventType.MP_TOKENS, self._stored)
        bus.subscribe(EventType.MP_LOOKUP, self._looked_up)

    def of(self, chunk_hash: bytes) -> int:
        """The place of a chunk's first token. Raises ValueError for a chunk of which nothing was said."""
        with self._more:
            if not self._more.wait_for(lambda: chunk_hash in self._told, self._patience):
                raise ValueError("a chunk of which LMCache does not say where it begins")
            return self._told[chunk_hash]

    def _stored(self, event: Event) -> None:
        self._patience = PATIENCE
        self._add(zip(event.metadata["chunk_hashes"], event.metadata["token_offsets"], strict=True))

    def _looked_up(self, event: Event) -> None:
        hashes, size = event.metadata["chunk_hashes"], event.metadata["chunk_size"]
        self._add((one, place * size) for place, one in enumerate(hashes))

    def _add(self, starts: Iterable[tuple[bytes, int]]) -> None:
        with self._more:
            for chunk_hash, start in starts:
                self._told.pop(chunk_hash, None)
                self._told[chunk_hash] = start  # the newest
            while len(self._told) > HELD:
                del self._told[next(iter(self._told))]
            self._more.notify_all()


class KVQSerializer(Serializer):
    """Chunks into bytes.

    starts   where chunks begin, of a recipe that needs it
    skips    whether the adapter leaves out what takes no bytes; else a chunk that cannot be kept is an error
    """

    def __init__(self, chunks: Chunks, starts: Starts | None, skips: bool):
        self.chunks, self.starts, self.skips = chunks, starts, skips

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        room = _tensor(dst).view(-1)
        try:
            given = _tensor(src)
            start = 0 if self.starts is None else self.starts.of(key.chunk_hash)
            codec = _codec(self.chunks, given, key)
            codec.encode(given, key_bytes(key), room[: codec.bytes], start)
            return codec.bytes
        except ValueError as error:
            _say(f"{error}; such chunks are not kept")
            if not self.skips:
                raise
            return 0

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
    """Bytes of a load into its chunks; bytes that are none are an error, which LMCache takes for a miss of all.

    adapter   that has the bytes, and gives up those that are none
    """

    def __init__(self, chunks: Chunks, adapter: Callable[[], L2AdapterInterface | None]):
        self.chunks, self.adapter = chunks, adapter

    def deserialize(  # type: ignore[override]
        self, src: Sequence[MemoryObj], dst: Sequence[MemoryObj], key: Sequence[ObjectKey]
    ) -> None:
        faults: dict[ObjectKey, ArtifactError] = {}
        for held, room, name in zip(src, dst, key, strict=True):
            data, out = _tensor(held), _tensor(room)
            try:
                _codec(self.chunks, out, name).decode(data, key_bytes(name), out)
            except ArtifactError as error:
                faults[name] = error
        if not faults:
            return
        adapter, (first, error) = self.adapter(), next(iter(faults.items()))
        if adapter is not None:
            adapter.delete([*faults])
        raise ArtifactError(
            f"{len(faults)} of {len(key)} chunks; the first, {first.chunk_hash.hex()} of {first.model_name}: {error}"
        )


class Processor(AsyncSerdeProcessor):
    """LMCache's, which ends a task at the first object that fails: so all chunks of a load are one object of it."""

    def submit_deserialize(
        self, src_objs: list[MemoryObj], dst_objs: list[MemoryObj], keys: list[ObjectKey]
    ) -> SerdeTaskId:
        return super().submit_deserialize([src_objs], [dst_objs], [keys])  # type: ignore[list-item]


def key_bytes(key: ObjectKey) -> bytes:
    """Return the key of a chunk as bytes, which its digest covers."""
    parts = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt]
    return json.dumps(parts).encode()


def build(given: dict[str, object]) -> SerdeProcessor:
    """The serde of these settings (`kvq_runtime/lmcache/chunk.py`). Raises what `chunk.read_settings` does, and
    ValueError for a recipe that the server does not serve."""
    found = chunk.read_settings(given)
    recipe = found.source.recipe
    bits = served_recipe.bits(recipe, found.geometry or chunk.typical(found.head_size))
    logger.info("kvq: %s, %.4g bits per element", recipe.name, bits)
    if torch_device_type == "cpu":
        _say(
            "no GPU here; vLLM on a CPU has pages in an order that LMCache takes for another: a recipe by channel or "
            "an artifact is wrong for it, and any other loses more than it states"
        )
    chunks, adapter = Chunks(found), _made.__dict__.pop("last", lambda: None)
    files = isinstance(adapter(), Files)
    starts = Starts() if "positions" in recipe.needs else None
    return Processor(KVQSerializer(chunks, starts, files), KVQDeserializer(chunks, adapter), max_workers=found.workers)


def _codec(chunks: Chunks, tensor: torch.Tensor, key: ObjectKey) -> ChunkCodec:
    """The codec of this worker's chunks; a key's rank holds how many workers there are, and which this one is."""
    ranks, rank = key.kv_rank >> 24 & 0xFF, key.kv_rank >> 16 & 0xFF
    return chunks.codec(tuple(tensor.shape), tensor.dtype, rank, ranks or None)


def _say(text: str) -> None:
    """Warn once of what differs by more than numbers: LMCache repeats its own line for each task that fails."""
    kind = re.sub(r"\d+", "", text)
    if kind not in _said:
        _said.add(kind)
        logger.warning("kvq: %s", text)


def _tensor(held: MemoryObj) -> torch.Tensor:
    count = len(held.get_shapes())
    tensor = held.tensor if count == 1 else None
    if tensor is None:
        raise ValueError(
            f"a chunk of {count} tensors, as of layers that slide beside others; kvq keeps chunks of one: start "
            "LMCache's server with --separate-object-groups"
        )
    return tensor


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, build)
