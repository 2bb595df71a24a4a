"""Stand in for TensorRT-LLM where it is not installed: its connector's interface, and the runtime that calls it.

The classes are abstract where TensorRT-LLM's are; `Runtime` calls them in the order in which its executor does, with
requests in pages of no order, prompts in chunks, and a reuse of pages by tokens of its own.
"""

import pickle
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any):
        self._llm_args = llm_args

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any):
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class Rank:
    """What `mpi_rank` answers."""

    now = 0


def installed(patch: pytest.MonkeyPatch) -> ModuleType:
    """The connector, imported over these classes as if they were TensorRT-LLM's."""
    interface = {
        "KvCacheConnectorScheduler": KvCacheConnectorScheduler, "KvCacheConnectorWorker": KvCacheConnectorWorker,
        "SchedulerOutput": SchedulerOutput, "RequestData": RequestData,
    }  # fmt: skip
    folder = "tensorrt_llm._torch.pyexecutor.connectors"
    content: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {}, "tensorrt_llm._utils": {"mpi_rank": lambda: Rank.now}, "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.pyexecutor": {}, folder: {}, f"{folder}.kv_cache_connector": interface,
    }  # fmt: skip
    for name, names in content.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        patch.setitem(sys.modules, name, module)
    patch.delitem(sys.modules, "kvq_runtime.tensorrt_llm.connector", raising=False)
    import kvq_runtime.tensorrt_llm.connector as connector

    return connector


def arguments(model: str, **other: Any) -> SimpleNamespace:
    """LLM arguments, with the defaults of what a connector may ask for."""
    cache = {
        "tokens_per_block": 32, "use_kv_cache_manager_v2": False, "enable_block_reuse": True, "host_cache_size": None,
        "max_attention_window": None, "dtype": "auto",
    }  # fmt: skip
    given = {
        "model": model, "revision": None, "dtype": "auto", "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "context_parallel_size": 1, "enable_attention_dp": False, "speculative_config": None, "max_beam_width": 1,
        "attn_backend": "TRTLLM", "sparse_attention_config": None,
    }  # fmt: skip
    cache |= {name: other.pop(name) for name in [*other] if name in cache and name != "dtype"}
    return SimpleNamespace(**given | other, kv_cache_config=SimpleNamespace(**cache))


class Request:
    """A request as the runtime shows it."""

    py_multimodal_data = None

    def __init__(self, number: int, tokens: list[int], **other: Any):
        self.request_id, self.tokens, self.computed = number, list(tokens), 0
        self.is_dummy_request, self.cache_salt_id = False, None
        self.lora_task_id = self.prompt_embedding_table = self.multimodal_embedding = None
        self.multimodal_hashes = self.mrope_rotary_cos_sin = None
        self.__dict__.update(other)
        self.told: tuple[int, int] | None = None  # tokens and pages that the scheduler was told

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Runtime:
    """One server: a scheduler on rank 0, a worker and a pool of each rank, and requests one at a time.

    reuses   pages of requests that have ended are found by their tokens, the first tokens of a page too, by a copy;
             else they are overwritten at once
    chunk    most tokens of a prompt that a step computes
    """

    def __init__(
        self, connector: Any, args: SimpleNamespace, layers: int, heads: int, size: int, *,
        dtype: torch.dtype = torch.bfloat16, pages: int = 64, chunk: int = 1 << 20, reuses: bool = True,
    ):  # fmt: skip
        self.page, self.ranks = args.kv_cache_config.tokens_per_block, args.tensor_parallel_size
        self.chunk, self.reuses = chunk, reuses
        self.layers, self.heads, self.size = layers, heads // self.ranks, size
        self.scheduler = connector.Scheduler(args)
        self.workers, self.pools, self.calls = [], [], list[str]()
        for Rank.now in range(self.ranks):
            worker = connector.Worker(args)
            pool = torch.full((pages, layers, 2, self.heads * self.page * size), 9.0, dtype=dtype)
            worker.register_kv_caches(pool)
            self.workers.append(worker)
            self.pools.append(pool)
        Rank.now = 0
        self.free, self.count = torch.randperm(pages).tolist(), 0
        self.reused: dict[tuple[int, ...], int] = {}

    def rows(self, rank: int, pages: list[int], tokens: int) -> Tensor:
        """Keys and values of a request's first tokens, [2, L, T, H, D]: heads lie before tokens in a page."""
        held = self.pools[rank][pages].view(-1, self.layers, 2, self.heads, self.page, self.size)
        return held.permute(2, 1, 0, 4, 3, 5).flatten(2, 3)[:, :, :tokens]

    def _write(self, rank: int, pages: list[int], start: int, rows_2LTHD: Tensor) -> None:
        pool = self.pools[rank].view(-1, self.layers, 2, self.heads, self.page, self.size)
        for place in range(rows_2LTHD.shape[2]):
            page, inner = divmod(start + place, self.page)
            pool[pages[page], :, :, :, inner] = rows_2LTHD[:, :, place].transpose(0, 1)

    def serve(self, tokens: list[int], rows_2LTHD: Tensor, answer: int = 0, **other: Any) -> tuple[int, Tensor]:
        """Serve a request: its prompt, and `answer` more of the tokens one by one, all computed as these rows.

        Returns how many tokens were loaded, and what of all ranks is in the pages of the prompt before its first step.
        """
        self.count += 1
        request = Request(self.count, tokens[: len(tokens) - answer], **other)
        prompt = len(request.tokens)
        computed, pages = self._reuse(request.tokens)
        matched, waits = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert computed + matched < prompt and waits == (matched > 0)
        pages += [self.free.pop() for _ in range(-(-prompt // self.page) - len(pages))]
        request.computed = computed + matched
        self.scheduler.update_state_after_alloc(request, list(pages))
        if waits:
            self._step(SchedulerOutput())
            for worker in self.workers:
                worker.start_load_kv(None)  # the runtime may show a step's orders again
            loading, started = {*range(self.ranks)}, [request.request_id]
            while loading:
                loading -= {rank for rank in loading if self.workers[rank].get_finished([], started)[1]}
                started = []
        whole = torch.cat([self.rows(rank, pages, request.computed) for rank in range(self.ranks)], 3).clone()
        while request.computed < len(tokens):
            if request.computed >= prompt:
                request.tokens.append(tokens[request.computed])
                if request.computed % self.page == 0:
                    pages.append(self.free.pop())
            stop = min(request.computed + self.chunk, len(request.tokens))
            self._compute(request, pages, stop, rows_2LTHD)
        assert self.scheduler.request_finished(request, list(pages)) is False
        if self.reuses:
            self.reused |= {tuple(tokens[: (n + 1) * self.page]): pages[n] for n in range(len(tokens) // self.page)}
            return matched, whole
        self.free += pages
        for pool in self.pools:
            pool[pages] = 9.0
        return matched, whole

    def _reuse(self, tokens: list[int]) -> tuple[int, list[int]]:
        """How many tokens are in pages already, at most all but one, and these; of the last one perhaps not all."""
        pages = list[int]()
        while (held := self.reused.get(tuple(tokens[: (len(pages) + 1) * self.page]))) is not None:
            if (len(pages) + 1) * self.page >= len(tokens):
                break
            pages.append(held)
        computed = len(pages) * self.page
        for same in range(min(self.page, len(tokens) - 1 - computed), 0, -1):
            end = computed + same
            like = [text for text in self.reused if len(text) == computed + self.page]
            like = [text for text in like if text[:end] == tuple(tokens[:end])]
            if like:
                pages.append(self.free.pop())
                for pool in self.pools:
                    pool[pages[-1]] = pool[self.reused[like[0]]]
                return end, pages
        return computed, pages

    def _compute(self, request: Request, pages: list[int], stop: int, rows_2LTHD: Tensor) -> None:
        tokens, held = request.told or (0, 0)
        data = RequestData(
            request.request_id, request.tokens[tokens:], pages[held:], request.computed, stop - request.computed
        )
        dummy = RequestData(1 << 40, [1], [0], 0, 1)  # which pads a batch
        self._step(SchedulerOutput([], [data, dummy]) if request.told else SchedulerOutput([data], [dummy]))
        request.told = len(request.tokens), len(pages)
        for rank, worker in enumerate(self.workers):
            for layer in range(self.layers):
                worker.wait_for_layer_load(layer, None)
                worker.save_kv_layer(layer, None)
            own = rows_2LTHD[:, :, request.computed : stop, rank * self.heads : (rank + 1) * self.heads]
            self._write(rank, pages, request.computed, own)
            worker.wait_for_save(None)
        for worker in self.workers:
            assert worker.get_finished([], []) == ([], [])
        request.computed = stop

    def _step(self, output: SchedulerOutput) -> None:
        told = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(told))
            worker.start_load_kv(None)

    def written(self) -> None:
        """Wait until what was kept is written."""
        for worker in self.workers:
            worker._keeper.close(120)
