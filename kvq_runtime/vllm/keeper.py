"""Carry out in a worker what was ordered: decode blocks into pages, and encode pages into blocks.

A load is done in slices, one a step, so that the requests that run beside it wait for a slice and not for a prompt.
What is kept is copied out of its pages when the step has been computed, and encoded and written by a thread of its own;
what would exceed `pending` bytes of copies is not kept, and counted.

A backend may put a page's elements in any order: a CPU's swaps dimensions of keys for its vector units. The order is
not known here; it is asked: tokens whose every element is a number of its own are written by the backend itself, and
where each number is found is the order. Numbers are written in digits of 8 bits, which every dtype holds exactly.

B pages of the cache · P pages in a row · N tokens of a page · H KV heads · D head size · X = H · N · 2 · D.
"""

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.prefix import chain
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.vllm.orders import Order, with_tallies

SLICE = 1024  # tokens of a load that are decoded in one step
DIGIT = 256  # bfloat16 has every whole number up to it
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # keys and values [T, H, D], cache, slots int64 [T]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pages:
    """A layer's cache, [B, H, N, 2 D] as vLLM shows it, and the inner order of its pages.

    places   where in a page each element of its tokens is, int64 [N · H · 2 · D], by token, head, key or value, element
    parts    pages of the cache that make up one of the engine's
    """

    cache_BHNC: Tensor
    places_X: Tensor
    parts: int = 1

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of the engine's pages, [tokens, H · D] each, copied."""
        heads, tokens, width = self.cache_BHNC.shape[1:]
        raw_PX = self.cache_BHNC[self._own(pages)].flatten(1)
        x_TH2D = raw_PX[:, self.places_X].view(len(raw_PX) * tokens, heads, 2, width // 2)
        return x_TH2D[:, :, 0].flatten(1), x_TH2D[:, :, 1].flatten(1)

    def write(self, pages: Sequence[int], k_THD: Tensor, v_THD: Tensor) -> None:
        """Put keys and values into the engine's pages, all of their tokens."""
        own_P, cache_BHNC = self._own(pages), self.cache_BHNC
        x_PX = torch.stack([k_THD, v_THD], 2).reshape(len(own_P), -1)
        raw_PX = torch.empty_like(x_PX, dtype=cache_BHNC.dtype)
        raw_PX[:, self.places_X] = x_PX.to(cache_BHNC.dtype)
        cache_BHNC[own_P] = raw_PX.view(-1, *cache_BHNC.shape[1:])

    def _own(self, pages: Sequence[int]) -> Tensor:
        own = [first * self.parts + n for first in pages for n in range(self.parts)]
        return torch.tensor(own, device=self.cache_BHNC.device)


def asked(cache_BHNC: Tensor, heads: int, size: int, write: Write) -> Tensor:
    """The `places` of a layer's pages, by what `write` does to page 0, whose content is put back.

    Raises ValueError for a cache that does not hold every element once, in a float dtype: it is quantized or padded.
    """
    tokens, shape = cache_BHNC.shape[2], list(cache_BHNC.shape[1:])
    count = heads * tokens * 2 * size
    if shape != [heads, tokens, 2 * size] or not cache_BHNC.dtype.is_floating_point or cache_BHNC.dtype.itemsize < 2:
        raise ValueError(f"a page is {shape}, {cache_BHNC.dtype}, and not {[heads, tokens, 2 * size]} in 16 or 32 bits")
    before = cache_BHNC[0].clone()
    numbers = torch.arange(count, device=cache_BHNC.device)
    slots = torch.arange(tokens, device=cache_BHNC.device)
    held = torch.zeros_like(numbers)
    try:
        for power in range(-(-(count - 1).bit_length() // 8)):
            x_NH2D = (numbers >> 8 * power).remainder(DIGIT).to(cache_BHNC.dtype).view(tokens, heads, 2, size)
            write(x_NH2D[:, :, 0].contiguous(), x_NH2D[:, :, 1].contiguous(), cache_BHNC, slots)
            held += cache_BHNC[0].flatten().long() << 8 * power
    finally:
        cache_BHNC[0] = before
    places_X = torch.full_like(numbers, -1)
    places_X[held.clamp(0, count - 1)] = numbers
    if not torch.equal(held.sort().values, numbers):
        raise ValueError("the attention backend does not keep keys and values as they are")
    return places_X


@dataclass
class _Load:
    order: Order
    done: int


@dataclass(frozen=True)
class _Copy:
    """Rows of the last blocks of a text, keys and values [T, C] of each layer, on the host.

    tokens   of the text, up to the end of the rows
    start    token of the first row
    names    of the blocks
    """

    tokens: tuple[int, ...]
    salt: str
    start: int
    rows: list[tuple[Tensor, Tensor]]
    names: list[str]
    bytes: int


class Keeper:
    """One worker's pages and kept prefixes.

    layers    pages of the store's layers, in order
    page      tokens of one of the engine's pages; divides a block, and is a multiple of the caches' own
    pending   bytes of copies that may wait to be encoded
    """

    def __init__(self, store: PrefixBlocks, layers: Sequence[Pages], page: int, pending: int):
        if store.block % page:
            raise ValueError(
                f"pages of {page} tokens do not divide {store.format.recipe.name}'s blocks of {store.block}; "
                f"use --block-size {store.block}, or a divisor of it"
            )
        self.store, self.layers, self.page, self.pending = store, layers, page, pending
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._loads: deque[_Load] = deque()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._copies: queue.Queue[_Copy | None] = queue.Queue()
        self._lock = threading.Lock()
        self._waiting, self._held = 0, set[str]()  # bytes of copies, and names of blocks, that are not written yet
        width = store.format.geometry.width
        self._block_bytes = 2 * len(layers) * store.block * width * store.format.dtype.itemsize
        self._thread: threading.Thread | None = None

    # ---- loads

    def begin(self, loads: Iterable[Order]) -> None:
        """Take loads in."""
        self._loads.extend(_Load(order, order.start) for order in loads)

    @torch.inference_mode()
    def go_on(self) -> None:
        """Decode the next slice of the oldest load into its pages."""
        if not self._loads:
            return
        began, load = time.monotonic(), self._loads[0]
        order, block = load.order, self.store.block
        first = load.done // block * block
        stop = min(order.stop, first + max(1, SLICE // block) * block)
        before = self.store.tally["read"]
        try:
            found = self._load(order, first, stop)
        except (ValueError, RuntimeError) as error:  # of this request alone: it is computed
            _log.warning("a kept prefix cannot be decoded, and is computed: %s", error)
            found = first
        self._count("bytes_loaded", self.store.tally["read"] - before)
        self._count("tokens_loaded", max(0, found - load.done))
        load.done = max(load.done, found)
        if found < stop:
            self._count("loads_failed", 1)
            self._failed.update(order.pages[(load.done - order.start) // self.page :])
        if found < stop or stop == order.stop:
            self._count("loads", 1)
            self._loaded.add(order.request)
            self._loads.popleft()
        self._count("seconds_loading", time.monotonic() - began)

    def _load(self, order: Order, first: int, stop: int) -> int:
        """Blocks from token `first` to `stop` into their pages; how far they were found."""
        store = self.store.under(order.salt)
        blocks = store.load(order.tokens, stop, first)
        end = first + len(blocks) * store.block
        start = max(first, order.start)  # of the first block, some pages may be there
        if end <= start:
            return end
        pages = order.pages[(start - order.start) // self.page : (end - order.start) // self.page]
        device = self.layers[0].cache_BHNC.device
        for layer, (_, k_THD, v_THD) in zip(self.layers, store.decode(blocks, device, first), strict=True):
            taken = slice(start - first, end - first)
            layer.write(pages, k_THD[taken], v_THD[taken])
        return end

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call, whole or not."""
        found, self._loaded = self._loaded, set()
        return found

    def take_failed(self) -> set[int]:
        """The engine's pages that were to be loaded and are not."""
        found, self._failed = self._failed, set()
        return found

    # ---- what is kept

    @torch.inference_mode()
    def keep(self, order: Order) -> None:
        """Copy the blocks that are not kept out of their pages, to be encoded; pages may be reused at once."""
        store, block = self.store.under(order.salt), self.store.block
        names = chain.names(store.root, chain.token_row(order.tokens), block)
        first = order.start // block
        while first < len(names) and self._has(names[first]):
            first += 1
        if first == len(names) or (first and not self._has(names[first - 1])):
            return
        room = max(0, (self.pending - self._waiting) // self._block_bytes)
        last = min(len(names), first + room)
        self._count("tokens_dropped", (len(names) - last) * block)
        if last > first:
            self._copy(order, first, names[first:last])

    def _copy(self, order: Order, first: int, names: list[str]) -> None:
        block, size = self.store.block, len(names) * self._block_bytes
        start, stop = first * block, (first + len(names)) * block
        pages = order.pages[(start - order.start) // self.page : (stop - order.start) // self.page]
        rows = [(k_TC.cpu(), v_TC.cpu()) for k_TC, v_TC in (layer.read(pages) for layer in self.layers)]
        with self._lock:
            self._waiting += size
            self._held.update(names)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="kvq-keeper", daemon=True)
            self._thread.start()
        self._copies.put(_Copy(order.tokens[:stop], order.salt, start, rows, names, size))

    def _has(self, name: str) -> bool:
        return name in self._held or self.store.shelf.has(name)

    @torch.inference_mode()
    def _write(self) -> None:
        while (copy := self._copies.get()) is not None:
            began, before = time.monotonic(), self.store.tally["written"]
            device, heads = self.layers[0].cache_BHNC.device, (self.store.format.geometry.kv_heads, -1)
            try:
                keys, values = (
                    [x.to(device).unflatten(1, heads) for x in part] for part in zip(*copy.rows, strict=True)
                )
                self.store.under(copy.salt).put(copy.tokens, keys, values, copy.start)
            except (OSError, ValueError, RuntimeError) as error:
                self._count("blocks_refused", len(copy.names))
                _log.warning("blocks of a prefix are not kept: %s", error)
            self._count("bytes_kept", self.store.tally["written"] - before)
            self._count("tokens_kept", self.store.block * sum(map(self.store.shelf.has, copy.names)))
            self._count("seconds_keeping", time.monotonic() - began)
            with self._lock:
                self._waiting -= copy.bytes
                self._held.difference_update(copy.names)
            self._copies.task_done()
        self._copies.task_done()

    def _count(self, name: str, number: float) -> None:
        with self._lock:
            self.counts[name] += number

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits, for at most `seconds` seconds."""
        if self._thread is not None:
            self._copies.put(None)
            self._thread.join(seconds)
            self._thread = None

    def take_counts(self) -> Mapping[str, float]:
        """Return the counts since the last call."""
        with self._lock:
            found, self.counts = self.counts, defaultdict(float)
        return with_tallies(found, [self.store])
