"""Plan and carry out loads and writes of prefixes for vLLM's requests: no import of vllm here.

`PrefixScheduler` runs in the scheduler's process, and decides which tokens of a request are loaded, and which whole
blocks of computed tokens are kept. `PrefixWorker` decodes blocks into a worker's pages, one load a step, and encodes
pages into blocks: it copies tokens out of their pages when the step has been computed, and a thread encodes and writes
them. Blocks are not kept while `PENDING` bytes of copies wait.

In vLLM's own 16-bit pages each backend has an order of its own: that of a CPU swaps dimensions of keys for its vector
units. `places_of` measures the order: the backend writes tokens whose every element is a number of its own. Numbers are
written in digits of 8 bits, which every dtype holds exactly.

B = pages of the cache · P pages in a row · N = tokens of a page · H KV heads · D head size · X = H · N · 2 · D.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.errors import ArtifactError, named
from kvq_runtime.prefix import chain
from kvq_runtime.prefix.store import PrefixBlocks, check_recipe
from kvq_runtime.vllm import served_recipe
from kvq_runtime.vllm.served_recipe import shard_of

DIGIT = 256  # bfloat16 has every whole number up to it
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # keys and values [T, H, D], cache, slots int64 [T]
PENDING = 1 << 30  # bytes of 16-bit keys and values that may wait to be encoded, in each worker
_log = logging.getLogger(__name__)


def open_store(options: Mapping[str, Any], model: Any, rank: int, ranks: int) -> PrefixBlocks:
    """Open the store of a worker's shard, by its rank among the workers of tensor parallelism.

    options   path: folder of the prefixes; recipe: a name or reference, as for KVQ_CACHE; budget: bytes of the folder
    model     vLLM's ModelConfig
    Raises ValueError or ArtifactError for a recipe that cannot be kept or is not of this model.
    """
    if not {"path", "recipe"} <= set(options) <= {"path", "recipe", "budget"}:
        names = ", ".join(sorted(options)) or "nothing"
        raise ValueError(f"kv_connector_extra_config has {names}; give path and recipe, and budget if wanted")
    with named(f"KVQConnector, recipe {options['recipe']}"):
        served = served_recipe.read(str(options["recipe"]))
        check_recipe(served.recipe)
        config = model.hf_text_config.to_dict()
        served, whole = served_recipe.match(served, config, model.model, model.revision)
        recipe = served.recipe
        weights = [*served_recipe.weights(served_recipe.model_folder(model.model, model.revision))]
        if not weights:
            raise ArtifactError(
                f"no safetensors files of {model.model} on this machine, by which models are told apart; "
                "save the model so, and give its folder"
            )
        digest = chain.model_digest(config, weights, model.quantization or "")
        rotary = None
        if "positions" in recipe.needs:
            from kvq_runtime.hf.model import rotary_of_config  # with transformers

            rotary = rotary_of_config(model.hf_text_config, model.dtype)
        shard = shard_of(whole, rank, ranks)
        return PrefixBlocks(
            options["path"], shard.recipe(recipe), shard.geometry(whole),
            shard.tensors(recipe, whole, served.tensors) if served.tensors else {},
            model=f"{digest} {shard.part}/{shard.parts}", dtype=model.dtype, rotary=rotary,
            budget=options.get("budget", "20GB"),
        )  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """Load or keep tokens `start` to `stop` of a request's text.

    tokens   the text's first `stop` token ids
    salt     of the request's tenant, or empty
    pages    of the engine, that hold tokens `start` to `stop`
    """

    request: str
    salt: str
    tokens: tuple[int, ...]
    start: int
    stop: int
    pages: tuple[int, ...]


class PrefixScheduler:
    """Plans the transfers of vLLM's requests.

    A request is loaded at most once: after a load that failed it is computed. Drafts are kept once they are accepted.
    The newest tokens, as many as the recipe's window, are computed, to be exact.

    store    of the first worker; if another one lacks a block, its load fails
    page     tokens of one of the engine's pages; divides a block
    """

    def __init__(self, store: PrefixBlocks, page: int):
        self.store, self.page, self.block = store, page, store.block
        self._requests: dict[str, Any] = {}  # that have pages
        self._matched: dict[str, int] = {}  # of requests that wait for pages: the end of the kept prefix
        self._loads: dict[str, tuple[int, int]] = {}  # that begin with the next step: first token, end
        self._loaded: dict[str, bool] = {}
        self._kept: dict[str, int] = {}  # the end of the tokens to keep, so far

    def matched(self, request: Any, computed: int) -> int:
        """Return how many tokens can be loaded beyond `computed`. An engine asks again while there is no room."""
        name = request.request_id
        skips = getattr(request, "skip_reading_prefix_cache", False)
        if name in self._loaded or skips or not _is_plain(request):
            return 0
        if name not in self._matched:
            tokens = list(request.all_token_ids)
            tokens = tokens[: max(0, len(tokens) - max(1, self.store.codec.recipe.window.recent))]
            self._matched[name] = self.store.of_tenant(request.cache_salt or "").longest(tokens)
        return max(0, self._matched[name] - computed)

    def allocated(self, request: Any, external: int) -> None:
        """Note that the request has pages, and that `external` tokens are to be loaded."""
        name = request.request_id
        self._requests[name] = request
        stop = self._matched.pop(name, 0)
        if external:
            self._loads[name] = stop - external, stop
            self._loaded[name] = True

    def transfers(
        self, computed: Mapping[str, tuple[int, int]], pages_of: Callable[[str], Sequence[int]]
    ) -> tuple[list[Transfer], list[Transfer]]:
        """Return the loads that this step begins, and the tokens to keep when it has been computed.

        computed   by scheduled request, how many of its tokens are computed before and after the step
        """
        loads, keeps = list[Transfer](), list[Transfer]()
        for name, (first, stop) in self._loads.items():
            start = first // self.page * self.page  # tokens of a page are written together
            loads.append(self._transfer(name, start, stop, pages_of))
        self._loads.clear()
        for name, (before, after) in computed.items():
            request = self._requests.get(name)
            if request is None or not _is_plain(request):
                continue
            start = before // self.block * self.block
            start = min(start, self._kept.get(name, start))
            stop = max(start, min(after, len(request.all_token_ids)) // self.block * self.block)
            if stop > start:
                keeps.append(self._transfer(name, start, stop, pages_of))
            self._kept[name] = stop
        return loads, keeps

    def finished(self, name: str) -> None:
        """Forget a request."""
        for state in (self._requests, self._matched, self._loads, self._loaded, self._kept):
            state.pop(name, None)

    def _transfer(self, name: str, start: int, stop: int, pages_of: Callable[[str], Sequence[int]]) -> Transfer:
        request = self._requests[name]
        pages = tuple(pages_of(name)[start // self.page : stop // self.page])
        return Transfer(name, request.cache_salt or "", tuple(request.all_token_ids[:stop]), start, stop, pages)


def _is_plain(request: Any) -> bool:
    """Return whether a request's keys and values follow from tokens, tenant and model alone."""
    return (
        request.prompt_token_ids is not None
        and not request.mm_features
        and request.prompt_embeds is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and request.lora_request is None
    )


class PrefixWorker:
    """One worker's pages and kept prefixes.

    layers   of the store, in order: their pages
    page     tokens of one of the engine's pages; divides a block
    """

    def __init__(self, store: PrefixBlocks, layers: Sequence["PageRows"], page: int):
        if store.block % page:
            raise ValueError(
                f"pages of {page} tokens do not divide {store.codec.recipe.name}'s blocks of {store.block}; give "
                f"--block-size {store.block}, or a divisor of it"
            )
        self.store, self.layers, self.page = store, layers, page
        self._loads: deque[Transfer] = deque()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._writer = ThreadPoolExecutor(1, "kvq-prefixes")
        self._pending: dict[str, None] = {}  # names of blocks that are not written yet
        self._refusal = ""  # the last reason why blocks were not kept
        width = store.codec.geometry.width
        self._block_bytes = 2 * len(layers) * store.block * width * store.codec.dtype.itemsize

    @torch.inference_mode()
    def step(self, loads: Iterable[Transfer]) -> None:
        """Queue loads, and decode the oldest into its pages."""
        self._loads.extend(loads)
        if not self._loads:
            return
        load = self._loads.popleft()
        try:
            stop = self._load(load)
        except (ValueError, RuntimeError) as error:  # of this request alone: it is computed
            _log.warning("a kept prefix cannot be decoded, and is computed: %s", error)
            stop = load.start
        self._failed.update(load.pages[(stop - load.start) // self.page :])
        self._loaded.add(load.request)

    def _load(self, load: Transfer) -> int:
        """Load blocks into pages; return the token up to which they were found."""
        store = self.store.of_tenant(load.salt)
        first = load.start // store.block * store.block
        blocks = store.load(load.tokens, first)
        stop = first + len(blocks) * store.block
        if stop <= load.start:
            return load.start
        pages, span = load.pages[: (stop - load.start) // self.page], slice(load.start - first, stop - first)
        decoded = store.codec.decode(blocks, self.layers[0].device, first)
        for layer, (_, k_THD, v_THD) in zip(self.layers, decoded, strict=True):
            layer.write(pages, k_THD[span], v_THD[span])
        return stop

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, whole or not."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Return the engine's pages that were to be loaded and are not."""
        failed, self._failed = self._failed, set()
        return failed

    @torch.inference_mode()
    def keep(self, text: Transfer) -> None:
        """Copy the blocks that are not kept out of their pages, to be encoded; pages may be reused at once."""
        store, block = self.store.of_tenant(text.salt), self.store.block
        names, first = store.names(text.tokens), text.start // block
        store.folder.touch(names[:first])  # in use, though vLLM's own cache may have them
        while first < len(names) and self._has(names[first]):
            first += 1
        if first and not self._has(names[first - 1]):
            return  # without the block before, it could not be found
        last = min(len(names), first + max(0, PENDING // self._block_bytes - len(self._pending)))
        if last < len(names):
            _log.warning("%d tokens of prefixes are not kept: too many wait", (len(names) - last) * block)
        if not (names := names[first:last]):
            return
        start, stop = first * block, (first + len(names)) * block
        pages = text.pages[(start - text.start) // self.page : (stop - text.start) // self.page]
        rows = ((k_TC.cpu(), v_TC.cpu()) for k_TC, v_TC in (layer.read(pages) for layer in self.layers))
        keys, values = zip(*rows, strict=True)
        self._pending.update(dict.fromkeys(names))
        self._writer.submit(self._write, text, names, keys, values, start)

    def _has(self, name: str) -> bool:
        return name in self._pending or self.store.folder.has(name)

    @torch.inference_mode()
    def _write(self, text: Transfer, names: list[str], keys: tuple, values: tuple, start: int) -> None:
        device = self.layers[0].device
        try:
            store = self.store.of_tenant(text.salt)
            store.put(text.tokens, [x.to(device) for x in keys], [x.to(device) for x in values], start)
        except (OSError, ValueError, RuntimeError) as error:
            if str(error) != self._refusal:
                _log.warning("blocks of a prefix are not kept: %s", error)
            self._refusal = str(error)
        for name in names:
            self._pending.pop(name, None)

    def close(self) -> None:
        """Write pending copies."""
        self._writer.shutdown()


@dataclass(frozen=True)
class PageRows:
    """A layer's 16-bit cache, [B, H, N, 2 D] as vLLM shows it, and the inner order of its pages.

    places   where in a page each element of its tokens is, int64 [N · H · 2 · D], by token, head, key or value, element
    parts    pages of the cache that make up one of the engine's
    """

    cache_BHNC: Tensor
    places_X: Tensor
    parts: int = 1

    @property
    def device(self) -> torch.device:
        return self.cache_BHNC.device

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the engine's pages, [tokens, H · D] each, copied."""
        _, heads, tokens, width = self.cache_BHNC.shape
        x_PX = self.cache_BHNC[self._own(pages)].flatten(1)[:, self.places_X]
        x_TH2D = x_PX.view(len(x_PX) * tokens, heads, 2, width // 2)
        return x_TH2D[:, :, 0].flatten(1), x_TH2D[:, :, 1].flatten(1)

    def write(self, pages: Sequence[int], k_THD: Tensor, v_THD: Tensor) -> None:
        """Put keys and values into the engine's pages, all of their tokens."""
        own_P, cache_BHNC = self._own(pages), self.cache_BHNC
        x_PX = torch.stack([k_THD, v_THD], 2).reshape(len(own_P), -1).to(cache_BHNC.dtype)
        raw_PX = torch.empty_like(x_PX)
        raw_PX[:, self.places_X] = x_PX
        cache_BHNC[own_P] = raw_PX.view(-1, *cache_BHNC.shape[1:])

    def _own(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor([first * self.parts + n for first in pages for n in range(self.parts)], device=self.device)


def places_of(cache_BHNC: Tensor, heads: int, size: int, write: Write) -> Tensor:
    """Return the `places` of a layer's pages, from what `write` does to page 0, vLLM's empty page, zeros afterwards.

    Raises ValueError for a cache that does not hold every element once, in a float dtype: it is quantized or padded.
    """
    tokens, shape, dtype = cache_BHNC.shape[2], list(cache_BHNC.shape[1:]), cache_BHNC.dtype
    if shape != [heads, tokens, 2 * size] or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"a page is {shape}, {dtype}, and not {[heads, tokens, 2 * size]} in 16 or 32 bits")
    slots = torch.arange(tokens, device=cache_BHNC.device)
    numbers = torch.arange(tokens * heads * 2 * size, device=cache_BHNC.device)
    written = torch.zeros_like(numbers)
    for power in range(-(-(len(numbers) - 1).bit_length() // 8)):
        x_NH2D = (numbers >> 8 * power).remainder(DIGIT).to(dtype).view(tokens, heads, 2, size)
        write(x_NH2D[:, :, 0].contiguous(), x_NH2D[:, :, 1].contiguous(), cache_BHNC, slots)
        written += cache_BHNC[0].flatten().long() << 8 * power
    cache_BHNC[0] = 0
    ordered, places_X = written.sort()
    if not torch.equal(ordered, numbers):
        raise ValueError("the attention backend does not keep keys and values as they are")
    return places_X
