"""Compute the keys of kernels under which Triton keeps compiled code: of a function after those that it calls.

In Triton 3.6 the key of a function depends on whether the keys of those it calls were computed before. So a process
that comes to its kernels in another order than the one before it, by another recipe or model, would find none of them
on disk, and compile for seconds at its first steps. Later versions compute keys in this order by themselves.
"""

import sys
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable


def settle() -> None:
    """Compute the keys of all kernels that are imported; of those known, nothing is done."""
    for name in sorted(sys.modules):
        if name.startswith(f"{__package__}."):
            for one in list(vars(sys.modules[name]).values()):
                _settle(one)


def _settle(one: Any) -> None:
    if not isinstance(one, JITCallable) or one.hash is not None:
        return
    function: Any = one.fn
    known, names = function.__globals__, function.__code__.co_names
    found = [known[name] for name in names if name in known]
    modules = [part for part in found if isinstance(part, ModuleType)]
    for called in found + [getattr(module, name, None) for module in modules for name in names]:
        if called is not one:
            _settle(called)
    one.cache_key  # noqa: B018
