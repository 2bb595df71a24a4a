"""Record a decode step as one CUDA graph, and replay it token after token; a flush between two of them is eager.

What a step does on the device depends on what is counted there, not on what the host counts (see fixed.py), so that it
can be replayed; what the host counts is counted after each replay (`BlockCache.advance`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kvq_runtime.attention.fixed import FixedStream
from kvq_runtime.attention.fused import refusal
from kvq_runtime.cache import BlockCache

T = TypeVar("T")
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def graph(step: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Record a step on the device: its result, and what replays it."""
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = step()
    return out, recorded.replay


def captured(cache: BlockCache, step: Callable[[], T], record: Record = graph) -> Callable[[], T]:
    """Record a decode step of one token as a CUDA graph; return what takes that step, again and again.

    step     a forward pass from tensors to tensors that stay where they are: fill in the token, and its position,
             before each call. It runs once here, and is undone. Its token is taken to be real and to follow the last.
    record   makes of a step (its result, what replays it)

    What is returned gives the step's own result, to be read before the next call; it encodes what is due.
    Raises RuntimeError where a layer is not read by the kernel, where the very next step flushes, and, when called,
    where rows have been selected or the cache was reset, so that what was recorded is elsewhere.
    """
    fixed = _recordable(cache)
    with _undone(cache, fixed):
        step()
    for stream in fixed:
        stream.stale = True
        stream.publish()
    with _undone(cache, fixed):
        out, replay = record(step)
    places = [stream.places for stream in fixed]

    def again() -> T:
        now = [stream for pair in cache.layers.values() for stream in pair]
        if list(map(id, now)) != list(map(id, fixed)) or [stream.places for stream in fixed] != places:
            raise RuntimeError("the cache is not where it was when the step was recorded; record it again")
        for stream in fixed:
            stream.publish()
        replay()
        cache.advance()
        return out

    return again


def _recordable(cache: BlockCache) -> list[FixedStream]:
    """All streams of the cache, if its next step can be recorded; else a RuntimeError."""
    if cache.votes is not None:
        raise RuntimeError(f"a step of this cache is no graph: the window of {cache.recipe.name} asks the device")
    streams = [stream for pair in cache.layers.values() for stream in pair]
    fixed = [stream for stream in streams if isinstance(stream, FixedStream)]
    if not fixed or len(fixed) < len(streams) or len(cache.layers) < len(cache.held):
        reason = refusal(cache.recipe, cache.geometry) or "no tokens yet, or they are not on a GPU"
        raise RuntimeError(f"a step of this cache is no graph: {reason}")
    if any(stream.beyond(stream.recent, 1) for stream in fixed):
        raise RuntimeError("the next step encodes a block; take it first, then record")
    sinks, length = fixed[0].side.sinks, cache.timeline.length
    if cache.timeline.complete(sinks, length) > length:
        raise RuntimeError(f"a row has fewer than its {sinks} exact first tokens; take a few steps first, then record")
    cache.fused.look(fixed[0].rows, 1, fixed[0].counts.device)
    if not cache.fused.regular:
        raise RuntimeError("padding is not on the left, or RoPE turns a part of a head; no kernel takes this step")
    return fixed


@contextmanager
def _undone(cache: BlockCache, streams: list[FixedStream]) -> Iterator[None]:
    """Forget what the host counts in a step."""
    length, stops = cache.timeline.length, [stream._stop for stream in streams]
    cache.timeline.recorded = True
    try:
        yield
    finally:
        cache.timeline.recorded, cache.timeline.length = False, length
        for stream, stop in zip(streams, stops, strict=True):
            stream._stop = stop
