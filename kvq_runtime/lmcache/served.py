"""Decide whether a recipe can keep LMCache's chunks; else the reason, and the nearest recipe that can.

A chunk is keys (after RoPE) and values of all layers of some tokens in a row, and is stored and found as a whole: what
needs whole blocks can be served, unlike in vLLM's pages. But LMCache tells of a chunk its hash alone, not where in the
text it is.
"""

from dataclasses import replace

from kvq_runtime.engines import nearest
from kvq_runtime.engines.nearest import Engine
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe


def refusal(recipe: Recipe, geometry: Geometry) -> str | None:
    """Return why the recipe cannot keep LMCache's chunks on a model of this shape: a clause; None: it can."""
    if recipe.policies:
        kinds = ", ".join(policy.kind for policy in recipe.policies)
        return f"it chooses among tokens, or waits for a prompt ({kinds}), and LMCache decides which chunks are held"
    if recipe.position == "pre":
        return "keys are encoded before RoPE, and LMCache does not say at which position a chunk begins"
    if "positions" in recipe.needs:
        return "the keys' mean turns with the position, and LMCache does not say at which one a chunk begins"
    if recipe.cross_layer:
        return "each layer is predicted from the decoded layer below, and a chunk's layers are kept by themselves"
    return None


LMCACHE = Engine("LMCache's chunks cannot be kept by", "keep them by", refusal)


def check(recipe: Recipe, geometry: Geometry) -> None:
    """Raise ValueError, a sentence that names the nearest recipe that can be served, unless this one can."""
    nearest.check(LMCACHE, recipe, geometry)


def cut(recipe: Recipe, tokens: int) -> Recipe:
    """The recipe with blocks that make up a chunk of `tokens` tokens: its own, or, if it rounds token by token, one.

    Raises ValueError if codes belong to a block and the chunk is not whole blocks.
    """
    block = recipe.window.block
    if tokens % block == 0:
        return recipe
    if any(scheme.axis == "channel" or scheme.correct is not None for scheme in recipe.schemes):
        raise ValueError(
            f"{recipe.name} encodes blocks of {block} tokens, and a chunk has {tokens}; "
            f"give LMCache's server a --chunk-size that {block} divides"
        )
    return replace(recipe, window=replace(recipe.window, block=tokens))
