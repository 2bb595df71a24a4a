"""Decide where an op runs: its torch body, or the Triton kernel that it names.

A CUDA tensor goes to the kernel where triton can be imported, anything else to the torch body, which is the reference
that every kernel is tested against. `kernels` is imported when the first kernel is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# "module.name" of every kernel of an op → its torch body
OPS: dict[str, Callable[..., Any]] = {}
_forced: list[bool] = []


@cache
def available() -> bool:
    """Return True if triton is installed."""
    return find_spec("triton") is not None


@contextmanager
def forced(kernels: bool) -> Iterator[None]:
    """For tests: run every op as a kernel (on CPU tensors in Triton's interpreter, TRITON_INTERPRET=1), or as torch."""
    _forced.append(kernels)
    try:
        yield
    finally:
        _forced.pop()


def runs_kernel(x: torch.Tensor) -> bool:
    """Return True if a kernel computes an op on this tensor."""
    return _forced[-1] if _forced else x.is_cuda and available()


def kernel(name: str) -> Callable[..., Any]:
    """Return a kernel of an op, "module.name" of kernels/encode/."""
    module, function = name.split(".")
    return getattr(kernels(f"encode.{module}"), function)


@cache
def kernels(module: str) -> ModuleType:
    """Return a module of kernels, imported when the first is needed."""
    return import_module(f"kvq_runtime.kernels.{module}")


def paired(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare that a torch op has a kernel, "module.name" of kernels/encode/, of the same arguments and results.

    The first argument is a tensor, whose device decides.
    """

    def pair(body: Callable[P, R]) -> Callable[P, R]:
        OPS[name] = body

        @wraps(body)
        def op(*args: P.args, **settings: P.kwargs) -> R:
            x: Any = args[0]
            return (kernel(name) if runs_kernel(x) else body)(*args, **settings)

        return op

    return pair
