"""Decide whether vLLM can serve a recipe from its pages; else the reason, and the nearest recipe that it can.

vLLM owns the pages: it may begin one anywhere in a prompt, share it between requests and hand it on. So a recipe is
served if what a page stores can be computed from that page's keys and values, and read back, alone: token by token or,
where codes belong to a whole block, when the page is full.
"""

from dataclasses import replace

import torch

from kvq_runtime.engines import nearest
from kvq_runtime.engines.nearest import Engine
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme


def refusal(recipe: Recipe, geometry: Geometry) -> str | None:
    """Return the reason why vLLM cannot serve the recipe on a model of this shape: a clause; None: it can."""
    if recipe.policies:
        kinds = ", ".join(policy.kind for policy in recipe.policies)
        return f"it chooses among tokens, or waits for a prompt ({kinds}), and vLLM decides which pages are held"
    if recipe.cross_layer:
        return "each layer is predicted from the decoded layer below, and vLLM's layers see their own pages alone"
    return None


def by_block(recipe: Recipe, geometry: Geometry) -> bool:
    """True if some codes of the recipe belong to a whole block, so that a page is encoded when it is full."""
    return not all(_by_token(scheme, geometry) for scheme in recipe.schemes)


def _by_token(scheme: Scheme, geometry: Geometry) -> bool:
    if scheme.axis == "channel" or scheme.correct is not None:
        return False
    few, more = (scheme.fields(tokens, geometry, torch.bfloat16) for tokens in (64, 128))
    return all(few[name][0] == (64, *more[name][0][1:]) and more[name][0][0] == 128 for name in few)


VLLM = Engine("vLLM cannot serve", "serve", refusal)


def check(recipe: Recipe, geometry: Geometry) -> None:
    """Raise ValueError, a sentence that names the nearest recipe that can be served, unless this one can."""
    nearest.check(VLLM, recipe, geometry)


def paged(recipe: Recipe, geometry: Geometry, tokens: int) -> Recipe:
    """The recipe with blocks of as many tokens as a page has. ValueError if its codes belong to other blocks."""
    block = recipe.window.block
    if tokens != block and by_block(recipe, geometry):
        raise ValueError(
            f"{recipe.name} encodes blocks of {block} tokens, and a page has {tokens}: --block-size {block}"
        )
    return replace(recipe, window=replace(recipe.window, block=tokens))
