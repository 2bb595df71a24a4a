"""Spare Triton's interpreter what it repeats: a third or more of the time of a kernel, and the same results.

For a launch it replaces what `triton.language` offers by versions in numpy. It does so again at every call of a
function inside the launch, to no further effect, and looks through all names of the language to find that out.
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
