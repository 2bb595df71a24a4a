"""LMCache's storage manager over its file tier, as its server has it."""

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from torch import Tensor

PATIENCE = 120  # seconds
PLUGIN = {"type": "plugin", "module_path": "kvq_runtime.prefix.lmcache", "class_name": "Adapter"}


def keys(text: str, count: int) -> list[ObjectKey]:
    """The keys of a text's first chunks, of one worker."""
    rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
    return [ObjectKey(sha256(f"{text} {n}".encode()).digest(), "demo", rank) for n in range(count)]


class Tier:
    """Puts chunks of any of LMCache's layouts into files of a folder, by a serde, and gets them from there.

    What it was given is forgotten when it is closed.
    """

    def __init__(self, folder: Path, serde: dict[str, Any], memory: int = 1 << 28):
        self.folder = folder
        adapter = PLUGIN | {"adapter_params": {"type": "fs", "base_path": str(folder)}, "serde": serde}
        memory_config = L1MemoryManagerConfig(size_in_bytes=memory, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config),
                eviction_config=EvictionConfig("noop"),
                l2_adapter_config=parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(adapter)])),
            )
        )

    def __enter__(self) -> "Tier":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def put(self, names: Sequence[ObjectKey], chunks: Sequence[Tensor], stored: bool = True) -> None:
        """Store chunks of one shape; return when the files are there, or at once if they need not be `stored`."""
        layout = MemoryLayoutDesc([chunks[0].shape], [chunks[0].dtype])
        reserved = self.manager.reserve_write(list(names), layout)
        for name, chunk in zip(names, chunks, strict=True):
            memory = reserved[name].tensor
            assert memory is not None
            memory.copy_(chunk)
        self.manager.finish_write(list(names))
        until = time.monotonic() + PATIENCE
        while stored and len(list(self.folder.glob("*.data"))) < len(names):
            assert time.monotonic() < until, "LMCache has not stored the chunks"
            time.sleep(0.01)

    def get(self, names: Sequence[ObjectKey], like: Tensor) -> list[Tensor]:
        """Return the first of these chunks that it has, of the shape and dtype of `like`."""
        layout = MemoryLayoutDesc([like.shape], [like.dtype])
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(names), 0, layout)]))
        assert self.manager.wait_prefetch_status(handle, PATIENCE), "LMCache has not looked up the chunks"
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        hits = list(names)[: result.hit_cells[0].popcount()]
        if not hits:
            return []
        with self.manager.read_prefetched_results(hits, result.l1_owners) as objects:
            assert objects is not None
            chunks = [memory.tensor.clone() for memory in objects if memory.tensor is not None]
        self.manager.finish_read_prefetched(hits, l1_owners=result.l1_owners)
        return chunks
