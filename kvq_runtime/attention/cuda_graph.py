"""Record a decode step as one CUDA graph, and replay it token after token; what encodes a block between is eager.

What a step does on the device depends on what is counted there, not on what the host counts (see `store/device.py`), so
that it can be replayed; what the host counts is counted after each replay (`advance`).
"""

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from kvq_runtime.attention.fused import Fused, refusal
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.positions import Positions

T = TypeVar("T")
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


class RecordableCache(Protocol):
    """What is asked of a `BlockCache`."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def held(self) -> Set[int]: ...
    @property
    def layers(self) -> Mapping[int, LayerStore]: ...
    @property
    def positions(self) -> Positions: ...
    @property
    def fused(self) -> Fused: ...
    def trial(self) -> AbstractContextManager[None]:
        """Undo the pass made inside."""
        ...

    def advance(self) -> None:
        """Count the token of a replayed step, and encode what is due."""
        ...


def graph(step: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Record a step on the device: its result, and what replays it."""
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = step()
    return out, recorded.replay


def captured(cache: RecordableCache, step: Callable[[], T], record: Record = graph) -> Callable[[], T]:
    """Record a decode step of one token as a CUDA graph; return what takes that step, again and again.

    step     a forward pass from tensors to tensors that stay where they are: fill in the token, and its position,
             before each call. It runs once here, and is undone. Its token is taken to be real and to follow the last.
    record   makes of a step (its result, what replays it)

    What is returned gives the step's own result, to be read before the next call; it encodes what is due.
    Raises RuntimeError where a layer is not read by the kernel, where the very next step encodes a block, and, when
    called, where rows have been reordered or the cache was reset, so that what was recorded is elsewhere.
    """
    stores = _recordable(cache)
    with cache.trial():
        step()
    for layer, store in stores.items():
        cache.fused.publish(store, layer)
    with cache.trial():
        out, replay = record(step)
    places = _places(stores)

    def again() -> T:
        if {layer: id(store) for layer, store in cache.layers.items()} != {
            layer: id(store) for layer, store in stores.items()
        } or _places(stores) != places:
            raise RuntimeError("the cache is not where it was when the step was recorded; record it again")
        for layer, store in stores.items():
            cache.fused.publish(store, layer)
        replay()
        cache.advance()
        return out

    return again


def _places(stores: Mapping[int, LayerStore]) -> list[int]:
    """Where the kernel finds the layers."""
    places = []
    for store in stores.values():
        assert store.index is not None
        places += [x.data_ptr() for x in (store.buffer_2BTC, store.index.sinks_2BSC, store.index.counts)]
        places += [table.data_ptr() for table in store.index.tables]
    return places


def _recordable(cache: RecordableCache) -> dict[int, LayerStore]:
    """All layers of the cache, if its next step can be recorded; else a RuntimeError."""
    stores = dict(cache.layers)
    if not stores or len(stores) < len(cache.held) or any(store.index is None for store in stores.values()):
        reason = refusal(cache.recipe, cache.geometry) or "no tokens yet, or they are not on a GPU"
        raise RuntimeError(f"a step of this cache is no graph: {reason}")
    if cache.recipe.policies:
        kinds = " and ".join(policy.kind for policy in cache.recipe.policies)
        raise RuntimeError(f"a step of this cache is no graph: the {kinds} policy of {cache.recipe.name} asks the host")
    if any(store.beyond(store.recent, 1) for store in stores.values()):
        raise RuntimeError("the next step encodes a block; take it first, then record")
    first = next(iter(stores.values()))
    sinks, length = first.window.sinks, cache.positions.length
    if cache.positions.complete(sinks, length) > length:
        raise RuntimeError(f"a row has fewer than its {sinks} exact first tokens; take a few steps first, then record")
    cache.fused.look(first.rows, 1, first.buffer_2BTC.device)
    if not cache.fused.regular:
        raise RuntimeError("padding is not on the left, or RoPE rotates a part of a head; no kernel takes this step")
    return stores
