"""What of an SGLang server keeps pages, on a CPU: its host pool, and its controller with the backend that it makes."""

import queue
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import no_torchvision  # noqa: F401, before SGLang
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from torch import Tensor

MODEL = Path(__file__).parents[2] / "artifacts" / "demo-model"
LAYERS, HEADS, SIZE, PAGE, SLOTS = 6, 2, 64, 128, 2048


class Server:
    """What of a server keeps pages: a host pool, and SGLang's controller with the backend that it makes."""

    def __init__(
        self, folder: Path, recipe: str, layout: str = "page_first", rank: int = 0, ranks: int = 1, **more: Any
    ):
        heads, page, dtype = HEADS // ranks, more.pop("page", PAGE), more.pop("dtype", torch.bfloat16)
        device = [torch.zeros(1, heads, SIZE, dtype=dtype) for _ in range(LAYERS)]
        pointers = torch.zeros(LAYERS, dtype=torch.uint64)
        info = MHABufferInfo(
            buffers=KVBuffers(
                k=tuple(device), v=tuple(device), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
            ),
            page_size=page, head_num=heads, head_dim=SIZE, v_head_dim=SIZE, dtype=dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.pool = MHATokenToKVPoolHost(
            info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=0, start_layer=0, end_layer=LAYERS,
            host_token_capacity=SLOTS,
        )  # fmt: skip
        extra = {
            "backend_name": "kvq", "module_path": "kvq_runtime.sglang.storage", "class_name": "KVQStorage",
            "interface_v1": 1, "path": str(folder), "recipe": recipe, "model": str(MODEL),
        } | more  # fmt: skip
        config = HiCacheStorageConfig(
            rank, ranks, 0, 1, 0, 1, False, False, layout == "page_first", "demo", extra_config=extra
        )
        controller = HybridCacheController.__new__(HybridCacheController)  # without its threads and processes
        controller.page_size, controller.storage_host_pool = page, self.pool
        controller.storage_backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        controller.storage_backend.register_mem_pool_host(self.pool)
        controller.page_get_func, controller.page_set_func = (
            controller._page_get_zero_copy, controller._page_set_zero_copy
        )  # fmt: skip
        controller.prefetch_sync_queue, controller.storage_config = queue.Queue(), config
        controller.mem_pool_host = SimpleNamespace(layout_lease=nullcontext)
        self.controller, self.backend = controller, controller.storage_backend

    def keep(self, tokens: list[int], rows_2LTHD: Tensor, prefix: int = 0) -> int:
        """Write rows of all but the first `prefix` tokens into the pool, and have them kept; returns how many are."""
        slots = self._slots(len(tokens) - prefix)
        for place, slot in enumerate(slots.view(-1, self.pool.page_size)[:, 0].tolist()):
            span = slice(prefix + place * self.pool.page_size, prefix + (place + 1) * self.pool.page_size)
            self.backend._page(slot).copy_(rows_2LTHD[:, :, span])
        keys = get_storage_hash_str(tokens, None, page_size=self.pool.page_size)
        before = prefix // self.pool.page_size
        operation = StorageOperation(slots, tokens[prefix:], hash_value=keys[before:], prefix_keys=keys[:before])
        self.controller._page_backup(operation)
        return prefix + operation.completed_tokens

    def find(self, tokens: list[int], prefix: int = 0) -> tuple[int, Tensor]:
        """How many tokens SGLang finds and loads of these after `prefix`, and the rows that are in the pool then.

        Where it finds, it tells the keys of the last node's ancestors, without that node's own, and none at the root.
        """
        keys = get_storage_hash_str(tokens, None, page_size=self.pool.page_size)
        before = prefix // self.pool.page_size
        last = keys[before - 1] if before else None
        operation = PrefetchOperation(SimpleNamespace(rid="one"), tokens[prefix:], last, keys[: max(0, before - 1)])
        operation.hash_value, hit = self.controller._storage_hit_query(operation)
        operation.host_indices = self._slots(hit)
        self.controller._page_transfer(operation)
        loaded = 0
        while not self.controller.prefetch_sync_queue.empty():
            ack = self.controller.prefetch_sync_queue.get()
            loaded = max(loaded, ack.completed_tokens or 0)
        pages = [self.backend._page(slot) for slot in operation.host_indices[: loaded : self.pool.page_size].tolist()]
        return loaded, torch.cat(pages, 2) if pages else torch.empty(2, LAYERS, 0, HEADS, SIZE)

    def _slots(self, tokens: int) -> Tensor:
        """Slots of whole pages, in no order."""
        pages = torch.randperm(SLOTS // self.pool.page_size, generator=torch.Generator().manual_seed(tokens))
        first_P = pages[: tokens // self.pool.page_size, None] * self.pool.page_size
        return (first_P + torch.arange(self.pool.page_size)).flatten()
