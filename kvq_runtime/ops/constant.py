"""Tensors of settings alone, which a process computes once: codebooks, orders, matrices of rotations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper  # what `lru_cache` returns, which has no public name

T = TypeVar("T")


def constant(maxsize: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Keep the newest `maxsize` results of a function, as `lru_cache`, for callers in any mode.

    The function runs outside inference mode, whatever its first caller does: autograd refuses products with tensors
    that were made in it.
    """

    def keep(make: Callable[..., T]) -> _lru_cache_wrapper[T]:
        return lru_cache(maxsize)(torch.inference_mode(False)(make))

    return keep
