"""Keep prefixes for a server: open the stores that its options name, and carry out in a worker what was ordered, decode
blocks into pages and encode pages into blocks.

A load is done in slices, one a step, so that the requests that run beside it wait for a slice and not for a prompt.
What is kept is copied out of its pages when the step has been computed, and encoded and written by a thread of its own;
what would exceed `pending` bytes of copies is not kept, and counted.
"""

import logging
import os
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvq_runtime.engines import served_recipe
from kvq_runtime.engines.scheduler import Order, with_tallies
from kvq_runtime.engines.served_recipe import Share
from kvq_runtime.errors import ArtifactError, named
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import chain
from kvq_runtime.prefix.block_folder import parse_bytes
from kvq_runtime.prefix.store import PrefixBlocks, check

SALT = "KVQ_PREFIX_SALT"
SLICE = 1024  # tokens of a load that are decoded in one step
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The options of an engine on kept prefixes.

    path      folder of the kept prefixes, shared by workers and servers
    recipe    name of a recipe, or a reference to an artifact, as for KVQ_CACHE
    budget    bytes of the folder
    recent    newest tokens of a prompt that are computed, to be exact; None: as many as the recipe's window keeps
    pending   bytes of 16-bit keys and values that may wait to be encoded, in each worker
    """

    path: str
    recipe: str
    budget: str | int = "20GB"
    recent: int | None = None
    pending: str | int = "1GB"


@dataclass(frozen=True)
class Served:
    """The model that a server serves: its decoder's configuration, its files, and what its keys and values are in.

    rotary   its rotation, by its configuration; raises ValueError for one that is not known so
    """

    config: Mapping[str, Any]
    name: str
    revision: str | None
    dtype: torch.dtype
    quantization: str | None
    rotary: Callable[[], Rotary]


def settings(extra: Mapping[str, Any], option: str, who: str) -> Settings:
    """The settings of these options, the value of an engine's `option`; ValueError, a sentence, for others."""
    known = Settings.__dataclass_fields__
    odd, missing = sorted(set(extra) - set(known)), [name for name in ("path", "recipe") if not extra.get(name)]
    if odd or missing:
        what = f"has {', '.join(odd)}" if odd else f"lacks {' and '.join(missing)}"
        raise ValueError(f"{option} {what}; {who} takes {', '.join(known)}")
    if wrong := next((name for name in ("path", "recipe") if not isinstance(extra[name], str)), None):
        raise ValueError(f"{option}: {wrong}={extra[wrong]!r:.80}; give text")
    found = Settings(**extra)
    if found.recent is not None and (type(found.recent) is not int or found.recent < 0):
        raise ValueError(f"{option}: recent={found.recent!r}; use a number of tokens, 0 or more")
    for name in {"budget", "pending"} & extra.keys():
        parse_bytes(extra[name], f"{option}: {name}=")
    return found


def opened(given: Settings, model: Served, who: str, ranks: int, rank: int | None = None) -> list[PrefixBlocks]:
    """The store of a worker's part of the model; without a rank, those of all parts.

    who     begins messages: the engine's part that asks
    ranks   workers of tensor parallelism
    Raises ValueError or ArtifactError for what cannot be kept, or is not of this model, OSError if the disk refuses,
    each with the reference.
    """
    with named(f"{who}, recipe {given.recipe}"):
        found = served_recipe.read(given.recipe)
        recipe = found.recipe
        check(recipe)
        whole = served_recipe.match(found, model.config, model.name, model.revision)
        folder = served_recipe.folder(model.name, model.revision)
        if folder is None:
            raise ArtifactError(f"the files of {model.name} are not on this machine; give its folder as the model")
        digest = chain.model_digest(folder, model.config, model.quantization or "")
        rotary = model.rotary() if "positions" in recipe.needs else None
        first = served_recipe.share_of(whole, rank or 0, ranks)
        shares = [first] if rank is not None else [Share(part, first.parts) for part in range(first.parts)]
        stores = []
        for share in shares:
            geometry, tensors = served_recipe.narrower(whole, share), {}
            if recipe.fitted:
                geometry, tensors = served_recipe.narrowed(recipe, whole, found.tensors, share)
            name = f"{digest} {share.part}/{share.parts}"
            stores.append(PrefixBlocks(
                given.path, recipe, geometry, tensors, model=name, dtype=model.dtype, rotary=rotary,
                salt=os.environ.get(SALT, ""), budget=given.budget,
            ))  # fmt: skip
        return stores


# ---- a worker at work ------------------------------------------------------------------------------------------------


class Pages(Protocol):
    """One layer's cache, in the engine's pages."""

    @property
    def device(self) -> torch.device: ...

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages' tokens, [tokens, H · D] each, copied."""
        ...

    def write(self, pages: Sequence[int], k_THD: Tensor, v_THD: Tensor) -> None:
        """Put keys and values into these pages, all of their tokens."""
        ...


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


class PrefixWorker:
    """One worker's pages and kept prefixes.

    layers    of the store, in order
    page      tokens of one of the engine's pages; divides a block
    pending   bytes of copies that may wait to be encoded
    """

    def __init__(self, store: PrefixBlocks, layers: Sequence[Pages], page: int, pending: int):
        if store.block % page:
            raise ValueError(
                f"pages of {page} tokens do not divide {store.format.recipe.name}'s blocks of {store.block}; use pages "
                f"of {store.block} tokens (--block-size, tokens_per_block), or of a divisor of it"
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
        device = self.layers[0].device
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
        # a block that has left the folder since it was decoded; without it what follows is not found
        gone = (number for number in sorted(order.decoded) if number >= first and not self._has(names[number]))
        names = names[: next(gone, None)]
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
            device, heads = self.layers[0].device, (self.store.format.geometry.kv_heads, -1)
            try:
                keys, values = (
                    [x.to(device).unflatten(1, heads) for x in part] for part in zip(*copy.rows, strict=True)
                )
                self.store.under(copy.salt).put(copy.tokens, keys, values, copy.start)
            except (OSError, ValueError, RuntimeError) as error:
                self._count("blocks_refused", len(copy.names))
                self.store.refused(error)
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
