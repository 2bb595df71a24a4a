"""Keep TensorRT-LLM's prefixes encoded in a folder, and load them from there: a KV cache connector.

    KVQ_PREFIXES='{"path": "/var/prefixes", "recipe": "kivi-2bit"}' trtllm-serve MODEL --config FILE

    kv_connector_config:
      connector_module: kvq_runtime.tensorrt_llm.connector
      connector_scheduler_class: Scheduler
      connector_worker_class: Worker
    kv_cache_config: {use_kv_cache_manager_v2: false}

TensorRT-LLM's own cache stays as it is, in 16 bits. Its pool is one tensor, whose pages hold keys and values of all
layers; the rank that schedules asks for a prefix when a request gets pages, and each rank carries orders out.

What was promised counts as computed, and nothing takes a promise back. So blocks are read and checked when they are
promised, and travel to the ranks with the step's orders; one that cannot be decoded then ends the server. Loads go the
asynchronous way: a request waits, and each step of the others decodes a slice of it.

Written to the interface of TensorRT-LLM 1.4.0rc4, whose runtime keeps a request's pages until its load has ended, with
its first KV cache manager, which gives a prompt all of its pages at once. Tests drive it by a stand-in for that
interface; it has not been run with the engine.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)
from tensorrt_llm._utils import mpi_rank
from torch import Tensor

from kvq_runtime.disk import strict_json
from kvq_runtime.engines import keeper, source
from kvq_runtime.engines.keeper import Keeper
from kvq_runtime.engines.orders import Orders, Planner, Text
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix.shelf import parse_bytes
from kvq_runtime.prefix.store import PrefixBlocks

OPTION = "KVQ_PREFIXES"
WHO = "kvq's connector for TensorRT-LLM"
# of a request, what besides its tokens decides keys and values
FOREIGN = (
    "lora_task_id",
    "prompt_embedding_table",
    "multimodal_embedding",
    "multimodal_hashes",
    "mrope_rotary_cos_sin",
)


class Scheduler(KvCacheConnectorScheduler):
    """Decide on rank 0 what is loaded and kept. Raises ValueError or OSError, a sentence, for what cannot be kept."""

    def __init__(self, llm_args: Any):
        super().__init__(llm_args)
        opened = _Opened.of(llm_args)
        recent, usual = opened.settings.recent, opened.stores[0].format.recipe.window.recent
        page = llm_args.kv_cache_config.tokens_per_block
        self._plan = Planner(opened.stores, page, usual if recent is None else recent, holds=True)
        self._promised: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._pages: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        text = _text(request)
        count = self._promised[text.name] = self._plan.matched(text, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        text = _text(request)
        self._tokens[text.name], self._pages[text.name] = list(text.tokens), list(block_ids)
        text = Text(text.name, self._tokens[text.name], text.salt, text.plain)
        self._plan.allocated(text, self._promised.pop(text.name, 0))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        for data in scheduler_output.new_requests:  # which tell all tokens and pages, and later what is new
            for held in (self._tokens, self._pages):
                held.get(str(data.request_id), []).clear()
        computed = {}
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            name = str(data.request_id)
            if name in self._pages:  # else a dummy
                self._tokens[name] += data.new_tokens
                self._pages[name] += data.new_block_ids
                computed[name] = data.computed_position, data.computed_position + data.num_scheduled_tokens
        return self._plan.orders(computed, self._pages.__getitem__)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        name = str(request.request_id)
        self._plan.finished([name])
        for held in (self._promised, self._tokens, self._pages):
            held.pop(name, None)
        return False


class Worker(KvCacheConnectorWorker):
    """Loads into one rank's pool, and keeps what is in it."""

    def __init__(self, llm_args: Any):
        super().__init__(llm_args)
        ranks = llm_args.tensor_parallel_size
        self._opened = _Opened.of(llm_args, mpi_rank() % ranks)
        self._keeper: Keeper | None = None

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        (store,), pool, page = self._opened.stores, kv_cache_tensor, self._llm_args.kv_cache_config.tokens_per_block
        shape = store.format.geometry
        wanted = [shape.layers, 2, shape.kv_heads * page * shape.head_size]
        if list(pool.shape[1:]) != wanted or pool.dtype != store.format.dtype:
            raise ValueError(
                f"{WHO}: the pool's pages are {list(pool.shape[1:])}, {pool.dtype}; read are {wanted}, "
                f"{store.format.dtype}: keys and values of layers that all attend to all tokens, in the model's dtype"
            )
        pool_BL2HND = pool.unflatten(3, (shape.kv_heads, page, shape.head_size))
        layers = [Pages(pool_BL2HND[:, layer]) for layer in range(shape.layers)]
        pending = parse_bytes(self._opened.settings.pending)
        self._keeper = Keeper(store, layers, page, pending, self._opened.part)
        weakref.finalize(self, self._keeper.close)  # TensorRT-LLM does not tell when it ends

    def start_load_kv(self, stream: Any) -> None:
        if self._keeper is not None and self._metadata is not None:
            loads, self._metadata.loads = self._metadata.loads, []  # the same orders may be shown again
            self._keeper.begin(loads)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a request that is loaded is in no step."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: `wait_for_save` has all layers."""

    def wait_for_save(self, stream: Any) -> None:
        if self._keeper is not None and self._metadata is not None:
            keeps, self._metadata.keeps = self._metadata.keeps, []
            with torch.cuda.stream(stream):
                for order in keeps:
                    self._keeper.keep(order)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        if self._keeper is None:
            return [], []
        self._keeper.go_on()
        if self._keeper.take_failed():
            raise RuntimeError(f"{WHO}: a kept prefix that was promised cannot be decoded; the log says why")
        return [], [int(name) for name in self._keeper.take_loaded()]


@dataclass(frozen=True)
class Pages:
    """One layer in the pool, [B, 2, H, N, D]: B pages of N tokens, whose heads come before their tokens."""

    pool_B2HND: Tensor

    @property
    def device(self) -> torch.device:
        return self.pool_B2HND.device

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        k_TC, v_TC = self.pool_B2HND[self._own(pages)].permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)
        return k_TC, v_TC

    def write(self, pages: Sequence[int], k_THD: Tensor, v_THD: Tensor) -> None:
        x_2PNHD = torch.stack([k_THD, v_THD]).unflatten(1, (len(pages), -1))
        self.pool_B2HND[self._own(pages)] = x_2PNHD.permute(1, 0, 3, 2, 4).to(self.pool_B2HND.dtype)

    def _own(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, device=self.device)


def _text(request: Any) -> Text:
    """The request as it is planned for; the runtime shows one of C++ or of Python, whose attributes are these."""
    other = any(getattr(request, name) is not None for name in FOREIGN) or getattr(request, "py_multimodal_data", None)
    salt = "" if request.cache_salt_id is None else str(request.cache_salt_id)
    return Text(str(request.request_id), request.get_tokens(0), salt, not (other or request.is_dummy_request))


@dataclass(frozen=True)
class _Opened:
    """The options, the stores of all parts of the model, or that of a rank, and which part it is."""

    settings: keeper.Settings
    stores: list[PrefixBlocks]
    part: int

    @staticmethod
    def of(args: Any, rank: int | None = None) -> "_Opened":
        _check_engine(args)
        given = os.environ.get(OPTION)
        if not given:
            raise ValueError(f'{WHO}: set {OPTION} to its options: {{"path": FOLDER, "recipe": NAME}}')
        extra = strict_json.loads(given.encode(), OPTION)
        if not isinstance(extra, dict):
            raise ValueError(f"{WHO}: {OPTION} is no JSON object of options")
        quantization = extra.pop("quantization", None)
        settings = keeper.settings(extra, OPTION, f"{WHO}, beside quantization,")
        model, ranks = str(args.model), args.tensor_parallel_size
        config = source.config(model, args.revision)
        dtype = _dtype(args.dtype, config)
        served = keeper.Served(
            config, model, args.revision, dtype, quantization,
            lambda: _rotary(source.folder(model, args.revision) or Path(model), dtype),
        )  # fmt: skip
        stores = keeper.opened(settings, served, WHO, ranks, rank)
        return _Opened(settings, stores, source.share_of(Geometry.from_config(config), rank or 0, ranks).part)


def _dtype(given: str, config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") if given == "auto" else given
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{WHO}: keys and values in {name} are not kept; serve with dtype bfloat16 or float16")
    return getattr(torch, name)


def _rotary(folder: Path, dtype: torch.dtype) -> Rotary:
    try:
        from kvq_runtime.hf.model import rotary_of_folder
    except ImportError as error:
        raise ValueError(f"turning keys back needs the extra hf ({error}); use a recipe after RoPE") from None
    return rotary_of_folder(folder, dtype)


def _check_engine(args: Any) -> None:
    """Raise ValueError, a sentence, for a server whose prefixes cannot be kept."""
    cache, why = args.kv_cache_config, None
    if args.pipeline_parallel_size > 1 or args.context_parallel_size > 1 or args.enable_attention_dp:
        why = "a worker has to hold all layers and tokens of its heads; use tensor parallelism alone"
    elif args.speculative_config is not None or args.max_beam_width > 1:
        why = "pages of drafts and beams are not kept; drop speculative_config, and max_beam_width above 1"
    elif args.attn_backend != "TRTLLM" or args.sparse_attention_config is not None:
        why = "the order inside of a page is known of attn_backend TRTLLM alone, without sparse attention"
    elif cache.use_kv_cache_manager_v2 is not False:
        why = "pages are those of the first KV cache manager: kv_cache_config: {use_kv_cache_manager_v2: false}"
    elif not cache.enable_block_reuse:
        why = "TensorRT-LLM asks for no prefix without reuse: kv_cache_config: {enable_block_reuse: true}"
    elif cache.host_cache_size:
        why = "pages that move to the host lose their place in the pool; drop kv_cache_config.host_cache_size"
    elif cache.max_attention_window is not None:
        why = "layers that do not attend to all tokens are not kept; drop kv_cache_config.max_attention_window"
    if why is not None:
        raise ValueError(f"{WHO}: {why}")
