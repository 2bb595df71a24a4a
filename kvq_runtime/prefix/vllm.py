"""Keep vLLM's prefixes encoded in a folder, and load them from there: a KV connector.

vLLM's own cache stays as it is, in 16 bits. Prefixes that have left it, or were computed by another server or before a
restart, come from the folder. Every layer of a prefix is available here, with its positions, so recipes that predict
across layers or encode keys before RoPE are kept, too (`prefix/vllm_requests.py`).

Loads are asynchronous: a request waits while it is loaded. If a block turns out damaged, it is computed from there on.
Pinned to vLLM 0.32 and 0.33, which call this interface experimental.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvq_runtime.errors import named
from kvq_runtime.ops.constant import own_defaults
from kvq_runtime.prefix.vllm_requests import PageRows, PrefixScheduler, PrefixWorker, Transfer, open_store, places_of
from kvq_runtime.vllm import plugin


@dataclass
class Metadata(KVConnectorMetadata):
    """A step's transfers, as vLLM hands them to workers."""

    loads: list[Transfer]
    keeps: list[Transfer]


class KVQConnector(KVConnectorBase_V1):
    """Loads and keeps prefixes; its options are those of `vllm_requests.open_store`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        _check_engine(vllm_config, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._page = vllm_config.cache_config.block_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        rank = vllm_config.parallel_config.rank % ranks if role is KVConnectorRole.WORKER else 0
        with own_defaults():
            self._store = open_store(options, vllm_config.model_config, rank, ranks)
        self._worker: PrefixWorker | None = None
        self._scheduler = PrefixScheduler(self._store, self._page)

    # ---- in the scheduler's process

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not kept is a miss later

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._scheduler.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        scheduled = scheduler_output.num_scheduled_tokens.items()
        computed = {name: (before[name], before[name] + n) for name, n in scheduled if name in before}
        pages: Any = self._kv_cache_manager
        return Metadata(*self._scheduler.transfers(computed, lambda name: pages.get_block_ids(name)[0]))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id)
        return False, None

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        modules = self._vllm_config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=extract_layer_index)
        geometry, layers = self._store.codec.geometry, []
        if [extract_layer_index(name) for name in names] != list(range(geometry.layers)):
            raise ValueError(f"KVQConnector: vLLM has caches of layers {', '.join(names)}; the model has {geometry}")
        for name in names:
            module, cache = modules[name], kv_caches[name]
            write = partial(module.impl.do_kv_cache_update, module)
            with torch.inference_mode():
                places_X = places_of(cache, geometry.kv_heads, geometry.head_size, write)
            layers.append(PageRows(cache, places_X, self._page // cache.shape[2]))
        self._worker = PrefixWorker(self._store, layers, self._page)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        if self._worker is not None:
            self._worker.step(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request that is being loaded is in no step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: `wait_for_save` has all layers."""

    def wait_for_save(self) -> None:
        metadata: Any = self._get_connector_metadata()
        if self._worker is not None:
            for transfer in metadata.keeps:
                self._worker.keep(transfer)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_loaded() if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _check_engine(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise ValueError for a server whose prefixes cannot be kept."""
    transfer, specs, why = config.kv_transfer_config, [group.kv_cache_spec for group in caches.kv_cache_groups], None
    assert transfer is not None
    if plugin.asked() is not None:
        why = f"{plugin.VARIABLE} is set: vLLM's pages hold packed codes, not 16-bit rows; unset it"
    elif transfer.kv_load_failure_policy != "recompute":
        why = 'a damaged block has to be computed: add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
    elif config.parallel_config.pipeline_parallel_size > 1:
        why = "a worker has to hold all layers of its heads; drop pipeline parallelism"
    elif getattr(config.speculative_config, "method", "ngram") != "ngram":
        why = "layers of a draft model are not kept; use ngram"
    elif len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or specs[0].sliding_window is not None:
        why = "some layers of the model do not attend to all tokens; their state is not kept"
    if why is not None:
        raise ValueError(f"KVQConnector: {why}")
    with named("KVQConnector"):
        plugin.check_engine(config)
