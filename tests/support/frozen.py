"""A stand-in for a CUDA graph: the step itself, repeated while all that the host counts stays as it was."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache


def frozen(cache: BlockCache, step: Callable[[], Tensor], like: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """What a graph is to a step, where there is none: all that the host counts stays as it was at the recording."""
    things = [cache, cache.positions, cache.fused.padding, *cache.layers.values()]

    def counts() -> list[dict[str, int]]:
        return [{name: value for name, value in vars(thing).items() if isinstance(value, int)} for thing in things]

    def restore(held: list[dict[str, int]]) -> None:
        for thing, values in zip(things, held, strict=True):
            vars(thing).update(values)

    out, then = torch.full_like(like, torch.nan), counts()

    def replay() -> None:
        now = counts()
        restore(then)
        out.copy_(step())
        cache.step = None  # which a recorded step does not have
        restore(now)

    return out, replay
