"""Record a decode step as one CUDA graph, and replay it token after token; what encodes a block between is eager.

What a step does on the device depends on what is counted there, not on what the host counts (`store/storage.py`), so
that it can be replayed; what the host counts is counted after each replay (`advance`).

`model.generate` does this by `CudaGraphs` (hf/cuda_graphs.py); a loop of one's own by `captured`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from kvq_runtime.cache import BlockCache

T = TypeVar("T")
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def graph(step: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Record a step on the device: its result, and what replays it."""
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = step()
    return out, recorded.replay


def refused(cache: BlockCache) -> str | None:
    """Return the reason why no step of this cache can be recorded while it holds these rows; None: one can."""
    stores = list(cache.layers.values())
    if len(stores) < cache.geometry.layers:
        return cache.refusal or "the cache holds no tokens yet"
    if cache.recipe.policies:
        kinds = " and ".join(policy.kind for policy in cache.recipe.policies)
        return f"the {kinds} policy of {cache.recipe.name} asks the host"
    if any(store.index is None for store in stores):
        return cache.refusal or f"the cache is on {stores[0].buffer_2BTC.device}, and graphs are of CUDA devices"
    cache.fused.look(stores[0].rows, 1, stores[0].buffer_2BTC.device)
    if not cache.fused.regular:
        return "padding is not on the left, or RoPE rotates a part of a head; no kernel takes this step"
    return None


def not_yet(cache: BlockCache) -> str | None:
    """Return the reason why the very next step cannot be recorded, though a later one can; None: it can."""
    first = next(iter(cache.layers.values()))
    if any(store.beyond(store.recent, 1) for store in cache.layers.values()):
        return "the next step encodes a block; take it first, then record"
    sinks, length = first.window.sinks, cache.positions.length
    if cache.positions.complete(sinks, length) > length:
        return f"a row has fewer than its {sinks} exact first tokens; take a few steps first, then record"
    return None


def captured(cache: BlockCache, step: Callable[[], T], record: Record = graph) -> "Recorded[T]":
    """Record a decode step of one token as a CUDA graph; return what takes that step, again and again.

    step     a forward pass from tensors to tensors that stay where they are: fill in the token, and its position,
             before each call. It runs once here, and is undone. Its token is taken to be real and to follow the last.
    record   step -> (its result, a function that replays it)

    Raises RuntimeError with the reason of `refused` or `not_yet`, and whatever the step raises.
    """
    cache.settle()
    reason = refused(cache) or not_yet(cache)
    if reason:
        raise RuntimeError(f"a step of this cache is no graph: {reason}")
    with trial(cache):
        step()
    cache.fused.publish(cache.layers)
    with trial(cache):
        out, replay = record(step)
    return Recorded(cache, out, replay)


@contextmanager
def trial(cache: BlockCache) -> Iterator[None]:
    """Undo the forward pass that is made inside when it has ended; the host counts its tokens, and does no more."""
    cache.positions.recorded = True
    try:
        yield
    finally:
        cache.positions.recorded = False
        cache.undo()


def advance(cache: BlockCache) -> None:
    """Count the token that a replayed step has taken in, in every layer, and encode what is due."""
    stores = cache.layers.values()
    first = next(iter(stores))
    if not any(store.beyond(store.recent, 1) for store in stores):  # nothing that could fail, and be undone
        cache.positions.extend(first.rows, 1, first.buffer_2BTC.device)
        for store in stores:
            store.arrived(1)
        return
    step = cache.begin(1, first.rows, first.buffer_2BTC)
    for store in stores:
        store.begin(step)
        store.arrived(1)
        step.taken.add(store.layer)
    for layer in sorted(cache.layers):
        cache.finish(layer)


class Recorded(Generic[T]):
    """A recorded step: called, it takes one token in all layers, and encodes what is due.

    It stays good over flushes, crops, eager passes, and a reorder of as many rows. After a reset, other rows or more
    tokens than the tables have room for it is not: `ready` says so.
    """

    def __init__(self, cache: BlockCache, out: T, replay: Callable[[], None]):
        self._cache, self._out, self._replay = cache, out, replay
        self._stores = dict(cache.layers)
        self._addresses = self._find_addresses()

    def __call__(self) -> T:
        """The step's own result, to be read before the next call. Raises RuntimeError where it is not `ready`."""
        if not self.ready():
            raise RuntimeError("the cache is not where it was when the step was recorded; record it again")
        return self.replay()

    def ready(self) -> bool:
        """Send the device the host's changes; True if the cache's tensors are still where they were recorded, and
        padding is as the kernel takes it. Between replays the device is asked nothing."""
        cache = self._cache
        cache.settle()
        if any(cache.layers.get(layer) is not store for layer, store in self._stores.items()):
            return False
        cache.fused.publish(self._stores)
        first = next(iter(self._stores.values()))
        cache.fused.look(first.rows, 1, first.buffer_2BTC.device)
        return cache.fused.regular and self._find_addresses() == self._addresses

    def replay(self) -> T:
        """As called, where `ready` has just said that it is."""
        self._replay()
        advance(self._cache)
        return self._out

    def _find_addresses(self) -> list[int]:
        """Return the addresses at which the kernel finds the layers."""
        found = [self._cache.fused.padding.starts_B]
        for store in self._stores.values():
            assert store.index is not None
            found += [store.buffer_2BTC, store.index.sinks_2BSC, store.index.counts, *store.index.tables]
        return [tensor.data_ptr() for tensor in found]
