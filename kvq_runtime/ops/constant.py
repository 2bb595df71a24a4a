"""Tensors that outlast the call that makes them: a cache's memory, and what is made of settings once a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper  # what `lru_cache` returns, which has no public name

T = TypeVar("T")

# of a function whose tensors last: those made in inference mode cannot be written into, or used by autograd, outside it
lasting = torch.inference_mode(False)


@contextmanager
def own_defaults() -> Iterator[None]:
    """Make tensors in float32 on the CPU where no other is named: a caller may have a model's dtype or device there."""
    before = torch.get_default_dtype()
    if before != torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        if before != torch.float32:
            torch.set_default_dtype(before)


def constant(maxsize: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Keep the newest `maxsize` results of a function, as `lru_cache`; its callers' mode and defaults change nothing.

    They need no gradients.
    """

    def keep(make: Callable[..., T]) -> _lru_cache_wrapper[T]:
        return lru_cache(maxsize)(lasting(torch.no_grad()(own_defaults()(make))))

    return keep
