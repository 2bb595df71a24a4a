"""LMCache's storage manager over one adapter, as its server has it, to put chunks into and get them from.

It copies what it is given into its memory, lets the adapter store it, and forgets it when it is closed. Chunks are of
any layout of LMCache's (`kvq_runtime/lmcache/chunk.py`).
"""

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
PLUGIN = {"type": "plugin", "module_path": "kvq_runtime.lmcache.plugin", "class_name": "Adapter"}


def adapter(folder: Path, serde: dict[str, Any] | None) -> dict[str, Any]:
    """The settings of an adapter that keeps files in a folder, as `--l2-adapter` has them."""
    files = {"type": "fs", "base_path": str(folder)}
    if serde is None:
        return files
    return (PLUGIN | {"adapter_params": files} if serde["type"] == "kvq" else files) | {"serde": serde}


def keys(text: str, count: int) -> list[ObjectKey]:
    """The keys of a text's first chunks, of one worker."""
    rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
    return [ObjectKey(sha256(f"{text} {n}".encode()).digest(), "demo", rank) for n in range(count)]


class Tier:
    """A storage manager. Raises what LMCache or the serde says of its settings."""

    def __init__(self, folder: Path, serde: dict[str, Any] | None, memory: int = 1 << 28):
        self.folder = folder
        settings = Namespace(l2_adapter=[json.dumps(adapter(folder, serde))])
        memory_config = L1MemoryManagerConfig(size_in_bytes=memory, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config),
                eviction_config=EvictionConfig("noop"),
                l2_adapter_config=parse_args_to_l2_adapters_config(settings),
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
            held = reserved[name].tensor
            assert held is not None
            held.copy_(chunk)
        self.manager.finish_write(list(names))
        until = time.monotonic() + PATIENCE
        while stored and len(list(self.folder.glob("*.data"))) < len(names):
            if time.monotonic() > until:
                raise TimeoutError(f"LMCache has not stored {len(names)} chunks in {PATIENCE} s")
            time.sleep(0.01)

    def get(self, names: Sequence[ObjectKey], like: Tensor) -> list[Tensor]:
        """The chunks that it has of a prefix, at most all; `like` has their shape and dtype."""
        layout = MemoryLayoutDesc([like.shape], [like.dtype])
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(names), 0, layout)]))
        if not self.manager.wait_prefetch_status(handle, PATIENCE):
            raise TimeoutError(f"LMCache has not looked up {len(names)} chunks in {PATIENCE} s")
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        hits = list(names)[: result.hit_cells[0].popcount()]
        if not hits:
            return []
        with self.manager.read_prefetched_results(hits, result.l1_owners) as held:
            assert held is not None
            found = [one.tensor.clone() for one in held if one.tensor is not None]
        self.manager.finish_read_prefetched(hits, l1_owners=result.l1_owners)
        return found
