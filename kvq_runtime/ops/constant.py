"""Tensors that outlast the call that makes them: a cache's memory, and what is made of settings once a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper  # what `lru_cache` returns, which has no public name

T = TypeVar("T")

# of a function whose tensors last: those made in inference mode cannot be written into, or used by autograd, outside it
lasting = torch.inference_mode(False)


@contextmanager
def own_defaults() -> Iterator[None]:
    """Make tensors in float32 on the CPU where no other is named: a caller may have a model's dtype or device there.

    The dtype is that of all threads: for the start of a process, before there are others.
    """
    before = torch.get_default_dtype()
    if before != torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        if before != torch.float32:
            torch.set_default_dtype(before)


def _on_cpu(make: Callable[..., T]) -> Callable[..., T]:
    @wraps(make)
    def made(*args: object, **settings: object) -> T:
        with torch.device("cpu"):  # of this thread alone
            return make(*args, **settings)

    return made


def constant(maxsize: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Keep the newest `maxsize` results of a function, as `lru_cache`; its callers' mode and device change nothing.

    They need no gradients. The function names the dtype of every number that it makes: the default is the process's,
    not the thread's, and another thread may be loading a model.
    """

    def keep(make: Callable[..., T]) -> _lru_cache_wrapper[T]:
        return lru_cache(maxsize)(lasting(torch.no_grad()(_on_cpu(make))))

    return keep
