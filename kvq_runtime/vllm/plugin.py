"""Load what the variable KVQ_CACHE names, check that vLLM can serve it, and register kvq's attention.

vLLM owns the pages: it may begin one anywhere in a prompt, share it between requests and hand it on. So a recipe is
served if the content of a full page can be computed from that page's keys and values, and read back, alone.
"""

import multiprocessing
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvq_runtime import errors
from kvq_runtime.artifact import recipe_text
from kvq_runtime.recipe import Recipe
from kvq_runtime.vllm import served_recipe
from kvq_runtime.vllm.served_recipe import ServedRecipe

VARIABLE = "KVQ_CACHE"
BACKEND = "kvq_runtime.vllm.backend.KVQBackend"


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe that vLLM cannot serve, whatever the model."""
    reason = None
    if recipe.policies:
        kinds = ", ".join(policy.kind for policy in recipe.policies)
        reason = f"it chooses among tokens, or waits for a prompt ({kinds}), and vLLM decides which pages are held"
    elif recipe.cross_layer:
        reason = "each layer is predicted from the decoded layer below, and vLLM's layers see their own pages alone"
    if reason is not None:
        raise ValueError(
            f"vLLM cannot serve {recipe.name}: {reason}; use kivi-4bit, or bits by layer: kvq-calibrate --recipe auto "
            "--bits 3.25 --for vllm"
        )


def check_engine(config: Any) -> None:
    """Raise ValueError for an engine, by its VllmConfig, in which kvq neither holds nor keeps keys and values."""
    dtype = config.cache_config.cache_dtype
    if dtype != "auto":
        raise ValueError(f"the recipe sets how keys and values are stored; drop --kv-cache-dtype {dtype}")
    if config.parallel_config.decode_context_parallel_size > 1:
        raise ValueError("a worker has to hold all tokens of its heads; drop decode context parallelism")


def by_block(recipe: Recipe) -> bool:
    """Return whether some codes belong to a whole block, not to a token, so that a page has to be a block."""
    return not all(scheme.by_token for scheme in recipe.schemes)


def paged(recipe: Recipe, tokens: int) -> Recipe:
    """Return the recipe with pages as its blocks: of `tokens`, vLLM's, or, where codes belong to blocks, several in one
    of vLLM's. ValueError if those do not fill it."""
    block = recipe.window.block
    if not by_block(recipe):
        return replace(recipe, window=replace(recipe.window, block=tokens))
    if tokens % block:
        raise ValueError(
            f"{recipe.name} encodes blocks of {block} tokens, and a page has {tokens}: --block-size {block}"
        )
    return recipe


def asked() -> str | None:
    """Return the value of the variable; None if it is not set or empty, and vLLM is unchanged."""
    return os.environ.get(VARIABLE) or None


def named(reference: str) -> AbstractContextManager[None]:
    """Begin messages of errors with the variable and its value."""
    return errors.named(f"{VARIABLE}={reference}")


@lru_cache(maxsize=4)
def load(reference: str) -> ServedRecipe:
    """Load a reference, once a process. Raises what `load_artifact` does, and ValueError, with the variable's name."""
    with named(reference):
        if recipe_text.is_recipe(reference):  # before a fit is asked for, which could not be served
            check_recipe(recipe_text.read(reference))
        served = served_recipe.read(reference)
        check_recipe(served.recipe)
    return served


def register() -> None:
    """Make kvq's attention the backend CUSTOM and, on a CPU, where vLLM has no choice of backend, its only one.

    vLLM calls this entry point in each of its processes. If the variable is set, its value is loaded at once, so that a
    wrong name stops the command before a model is read; workers check it against the model.
    """
    reference = asked()
    if reference is None:
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if multiprocessing.parent_process() is None:
        load(reference)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
