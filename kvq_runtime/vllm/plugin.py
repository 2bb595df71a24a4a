"""Find what the variable KVQ_CACHE names, decide whether vLLM can serve it, and register kvq's attention.

vLLM owns the pages: it may begin one anywhere in a prompt, share it between requests and hand it on. So a recipe is
served if what a page stores can be computed from that page's keys and values, and read back, alone: token by token or,
where codes belong to a whole block, when the page is full.
"""

import multiprocessing
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kvq_runtime import errors
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.vllm import served_recipe
from kvq_runtime.vllm.served_recipe import ServedRecipe

VARIABLE = "KVQ_CACHE"
BACKEND = "kvq_runtime.vllm.backend.KVQBackend"
TYPICAL = MODELS["qwen2.5-7b"]  # asked before the model is known; it is asked again for the model itself


def refusal(recipe: Recipe) -> str | None:
    """Return why vLLM cannot serve a recipe; None: it can."""
    if recipe.policies:
        kinds = ", ".join(policy.kind for policy in recipe.policies)
        return f"it chooses among tokens, or waits for a prompt ({kinds}), and vLLM decides which pages are held"
    if recipe.cross_layer:
        return "each layer is predicted from the decoded layer below, and vLLM's layers see their own pages alone"
    return None


def check_recipe(recipe: Recipe, geometry: Geometry) -> None:
    """Raise ValueError for a recipe that vLLM cannot serve, or that does not fit this shape."""
    reason = refusal(recipe)
    if reason is not None:
        raise ValueError(f"vLLM cannot serve {recipe.name}: {reason}; docs/serve-vllm.md lists the recipes that it can")
    recipe.check(geometry)


def by_block(recipe: Recipe, geometry: Geometry) -> bool:
    """True if some codes of the recipe belong to a whole block, so that a page is encoded when it is full."""
    return not all(_by_token(scheme, geometry) for scheme in recipe.schemes)


def _by_token(scheme: Scheme, geometry: Geometry) -> bool:
    if scheme.axis == "channel" or scheme.correct is not None:
        return False
    few, more = (scheme.fields(tokens, geometry, torch.bfloat16) for tokens in (64, 128))
    return all(few[name][0] == (64, *more[name][0][1:]) and more[name][0][0] == 128 for name in few)


def paged(recipe: Recipe, geometry: Geometry, tokens: int) -> Recipe:
    """The recipe with blocks of as many tokens as a page has. ValueError if its codes belong to other blocks."""
    block = recipe.window.block
    if tokens != block and by_block(recipe, geometry):
        raise ValueError(
            f"{recipe.name} encodes blocks of {block} tokens, and a page has {tokens}: --block-size {block}"
        )
    return replace(recipe, window=replace(recipe.window, block=tokens))


def asked() -> str | None:
    """Return the value of the variable; None if it is not set or empty, and vLLM is unchanged."""
    return os.environ.get(VARIABLE) or None


def named(reference: str) -> AbstractContextManager[None]:
    """Begin messages of errors with the variable and its value."""
    return errors.named(f"{VARIABLE}={reference}")


@lru_cache(maxsize=4)
def load(reference: str) -> ServedRecipe:
    """Load it, once a process. Raises what `load_artifact` does, and ValueError, with the variable's name."""
    with named(reference):
        found = served_recipe.read(reference)
        check_recipe(found.recipe, TYPICAL if found.artifact is None else found.artifact.fingerprint.geometry)
    return found


def check_model(found: ServedRecipe, config: Mapping[str, Any], model: str, revision: str | None) -> Geometry:
    """The shape of the served model. Raises ValueError or ArtifactError unless the recipe and the artifact are for it.

    config     of the model's decoder, as in config.json
    model      its folder or its id on a Hub, whose files vLLM has fetched: their projections are compared, where found
    """
    with named(found.reference):
        geometry = served_recipe.match(found, config, model, revision)
        check_recipe(found.recipe, geometry)
    return geometry


def register() -> None:
    """Make kvq's attention the backend CUSTOM and, on a CPU, where vLLM takes no choice of backend, its only one.

    vLLM calls this entry point in each of its processes. Nothing happens unless the variable is set. Then what it names
    is loaded at once, so that a wrong name stops the command before a model is read; the check against the model
    follows in the workers.
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
