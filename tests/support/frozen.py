"""A stand-in for a CUDA graph: the step itself, repeated while all that the host counts stays as it was; and for what
a capture refuses."""

from collections.abc import Callable

import pytest
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


class Silent:
    """Inside, a tensor that is asked for its value raises: what a recorded step must not do."""

    NAMES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu")

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch

    def __enter__(self) -> None:
        def asked(*args, **settings):
            raise AssertionError("the step asks the device")

        for name in self.NAMES:
            self.patch.setattr(torch.Tensor, name, asked)
        self.patch.setattr(torch, "equal", asked)

    def __exit__(self, *args) -> None:
        self.patch.undo()
