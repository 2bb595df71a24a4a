"""Keep vLLM's prefixes encoded in a folder, and load them from there: a KV connector.

vLLM's own cache stays as it is, in 16 bits; what has left it, or was computed by another server or before a restart,
comes from the folder. Every layer of a prefix is at hand here, with its positions, so that recipes which predict across
layers or encode keys before RoPE are kept as all others. `engines/scheduler.py` plans
in the scheduler's process; `engines/worker.py` has the options, and loads and keeps in each worker.

    --kv-transfer-config '{"kv_connector": "KVQConnector", "kv_connector_module_path": "kvq_runtime.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": "/var/prefixes", "recipe": "qwen2.5-7b-aqua-2bit@production"}}'

Loads go by vLLM's asynchronous way: a request waits while it is loaded, and where a block turns out damaged then, it is
computed from there on. Pinned to vLLM 0.32 and 0.33, which call this interface experimental.
"""

from collections.abc import Sequence
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
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvq_runtime.engines import worker
from kvq_runtime.engines.scheduler import Orders, Planner, text_of
from kvq_runtime.engines.worker import PrefixWorker
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf.model import rotary_of_config
from kvq_runtime.ops.constant import own_defaults
from kvq_runtime.prefix.block_folder import parse_bytes
from kvq_runtime.vllm import page, plugin
from kvq_runtime.vllm.page import Rows

logger = init_logger("vllm.kvq")


@dataclass
class Metadata(Orders, KVConnectorMetadata):
    """A step's orders, as vLLM hands them to workers."""


class KVQConnector(KVConnectorBase_V1):
    """Loads and keeps prefixes; its options are those of `worker.Settings`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        _check_engine(vllm_config, kv_cache_config)
        self._settings = worker.settings(
            self._kv_transfer_config.kv_connector_extra_config, "kv_connector_extra_config", "KVQConnector"
        )
        self._page = vllm_config.cache_config.block_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        rank = vllm_config.parallel_config.rank % ranks if role is KVConnectorRole.WORKER else None
        with own_defaults():
            self._stores = worker.opened(self._settings, _served(vllm_config), "KVQConnector", ranks, rank)
        self._keeper: PrefixWorker | None = None
        self._planner: Planner | None = None
        if rank is None:
            recent, recipe = self._settings.recent, self._stores[0].format.recipe
            self._planner = Planner(self._stores, self._page, recipe.window.recent if recent is None else recent)
            logger.info("kvq: prefixes are kept in %s as %s", self._settings.path, recipe.name)

    # ---- in the scheduler's process

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not kept is a miss later

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._plan.matched(text_of(request), num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plan.allocated(text_of(request), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        scheduled = scheduler_output.num_scheduled_tokens.items()
        counts = {name: (before[name], before[name] + n) for name, n in scheduled if name in before}
        made = self._plan.orders(counts, self._pages_of)
        return Metadata(made.loads, made.keeps)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._plan.finished([request.request_id])
        return False, None

    @property
    def _plan(self) -> Planner:
        assert self._planner is not None, "asked for a plan in a worker"
        return self._planner

    def _pages_of(self, request: str) -> Sequence[int]:
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.get_block_ids(request)[0]

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        modules = self._vllm_config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=extract_layer_index)
        store = self._stores[0]
        count = store.format.geometry.layers
        if [extract_layer_index(name) for name in names] != list(range(count)):
            raise ValueError(
                f"KVQConnector: vLLM has caches of {len(names)} layers ({', '.join(names[:3])}, ...), the model "
                f"{count}; models whose layers share caches, and draft models, are not kept"
            )
        known, layers = {}, []
        for name in names:
            module, cache = modules[name], kv_caches[name]
            kind = type(module.impl), cache.shape, cache.stride(), cache.dtype
            if kind not in known:
                known[kind] = _places(module, cache, store.format.geometry)
            layers.append(Rows(cache, known[kind], self._page // cache.shape[2]))
        self._keeper = PrefixWorker(store, layers, self._page, parse_bytes(self._settings.pending))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._keeper is not None:
            self._keeper.begin(self._orders.loads)
            self._keeper.go_on()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request that is loaded is in no step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: `wait_for_save` has all layers."""

    def wait_for_save(self) -> None:
        if self._keeper is not None:
            for order in self._orders.keeps:
                self._keeper.keep(order)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._keeper.take_loaded() if self._keeper is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._keeper.take_failed() if self._keeper is not None else set()

    def shutdown(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    @property
    def _orders(self) -> Orders:
        found = self._get_connector_metadata()
        assert isinstance(found, Metadata)
        return found

    # ---- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        teller = self._planner or self._keeper
        counts = dict(teller.take_counts()) if teller is not None else {}
        return Stats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _served(config: VllmConfig) -> worker.Served:
    model, decoder = config.model_config, config.model_config.hf_text_config
    rotary = partial(rotary_of_config, decoder, model.dtype)
    return worker.Served(decoder.to_dict(), model.model, model.revision, model.dtype, model.quantization, rotary)


def _places(module: Any, cache: Tensor, geometry: Geometry) -> Tensor:
    """The places at which a layer's attention puts the elements of a page."""
    try:
        with torch.inference_mode():
            write = partial(module.impl.do_kv_cache_update, module)
            return page.places_of(cache, geometry.kv_heads, geometry.head_size, write)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"KVQConnector cannot read the cache of {type(module.impl).__name__}: {error}; "
            "choose another --attention-backend"
        ) from None


def _check_engine(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise ValueError, a sentence, for a server whose prefixes cannot be kept."""
    parallel, transfer, speculative = config.parallel_config, config.kv_transfer_config, config.speculative_config
    assert transfer is not None
    why = None
    if plugin.asked() is not None:
        why = f"{plugin.VARIABLE} is set: vLLM's pages hold packed codes, not 16-bit rows; unset it"
    elif transfer.kv_load_failure_policy != "recompute":
        why = 'a damaged block has to be computed: add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
    elif transfer.kv_role != "kv_both":
        why = f'kv_role is "{transfer.kv_role}"; what it loads it also keeps: use "kv_both"'
    elif parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        why = "a worker has to hold all layers and tokens of its heads; drop pipeline and context parallelism"
    elif speculative is not None and speculative.method != "ngram":
        why = f"layers of a draft model are not kept (speculative method {speculative.method}); use ngram"
    elif config.cache_config.cache_dtype != "auto":
        why = f"vLLM's cache has to be in the model's dtype; drop --kv-cache-dtype {config.cache_config.cache_dtype}"
    elif len(caches.kv_cache_groups) != 1 or not _plain(caches.kv_cache_groups[0].kv_cache_spec):
        why = "some layers of the model do not attend to all tokens; what they hold is not kept"
    if why is not None:
        raise ValueError(f"KVQConnector: {why}")


def _plain(spec: Any) -> bool:
    return type(spec) is FullAttentionSpec and spec.sliding_window is None


COUNTS = {
    "lookups": "requests that were looked up among kept prefixes",
    "hits": "requests of which a prefix was found",
    "loads": "loads of prefixes, summed over workers",
    "loads_failed": "loads that ended early, whose rest was computed",
    "tokens_loaded": "tokens decoded into pages, summed over workers",
    "bytes_loaded": "bytes of encoded blocks that were read",
    "tokens_kept": "tokens whose blocks were encoded and written, summed over workers",
    "bytes_kept": "bytes of encoded blocks that were written",
    "tokens_dropped": "tokens not kept because too much waited to be encoded",
    "blocks_damaged": "blocks that failed a check, and were removed",
    "blocks_unreadable": "blocks that could not be read",
    "blocks_refused": "blocks that could not be encoded or written",
    "seconds_loading": "seconds in which workers decoded",
    "seconds_keeping": "seconds in which workers encoded and wrote",
}


@dataclass
class Stats(KVConnectorStats):
    """Counts since the last report: {name: number}."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        names = {*self.data, *other.data}
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvq {name}": round(self.data[name], 3) for name in COUNTS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Metrics(KVConnectorPromMetrics):
    """A Prometheus counter for each count: kvq_prefix_hits_total and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {name: self._counter_cls(f"kvq_prefix_{name}", text, labelnames=labelnames)
                for name, text in COUNTS.items()}  # fmt: skip
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in made.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in COUNTS and count:
                self._counters[engine_idx][name].inc(count)
