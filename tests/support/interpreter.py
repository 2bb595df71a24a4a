"""Spare Triton's interpreter what it repeats: a third or more of the time of a kernel, and the same results.

For a launch it replaces what `triton.language` offers by versions in numpy. It does so again at every call of a
function inside the launch, to no further effect, and looks through all names of the language to find that out. For
every operation it makes the table of numpy's types anew, and broadcasts both operands, of one shape or not.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


def spare() -> None:
    """Patch the interpreter of this process, if it is there and has what is patched."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):
        patch = interpreter._patch_lang
        interpreter._patch_lang = _once(interpreter, getattr(patch, "__wrapped__", patch))
    semantic = getattr(sys.modules.get("triton.language.semantic"), "TritonSemantic", None)
    if hasattr(interpreter, "_get_np_dtype") and hasattr(semantic, "broadcast_impl_value"):
        interpreter._get_np_dtype = _looked_up(interpreter)
        semantic.broadcast_impl_value = _of_two_shapes(semantic.broadcast_impl_value)


def _looked_up(interpreter: Any) -> Callable[[Any], Any]:
    """`_get_np_dtype`, which asks once for each scalar type."""
    original = getattr(interpreter._get_np_dtype, "__wrapped__", interpreter._get_np_dtype)
    of_scalar = cache(original)

    @wraps(original)
    def looked_up(type: Any) -> Any:
        scalar = type.scalar
        return original(scalar) if scalar.is_ptr() else of_scalar(scalar)

    return looked_up


def _of_two_shapes(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast_impl_value`, which leaves blocks of one shape as they are."""
    original = getattr(broadcast, "__wrapped__", broadcast)

    @wraps(original)
    def of_two_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        same = one.is_block() and other.is_block() and list(one.shape) == list(other.shape)
        return (lhs, rhs) if same else original(self, lhs, rhs)

    return of_two_shapes


def _once(interpreter: Any, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's `patch`, which does nothing to what is patched until the launch is over."""
    language, done = interpreter.tl, set()

    @cache
    def seen(module: str) -> frozenset[str]:
        """By which names a module knows the language: `triton.language`, its core, or both."""
        values = vars(sys.modules[module]).values()
        return frozenset(x.__name__ for x in values if inspect.ismodule(x) and x in (language, language.core))

    @wraps(patch)
    def once(function: Any) -> Any:
        new, launch = seen(function.__module__) - done, not done
        if not (new or launch):
            return interpreter._LangPatchScope()
        scope = patch(function)
        done.update(new)
        if launch:  # its end restores everything
            restore = scope.restore
            scope.restore = lambda: (restore(), done.clear())
        return scope

    return once
