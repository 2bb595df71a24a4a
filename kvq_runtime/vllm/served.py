"""Say whether vLLM can serve a recipe from its pages, why not, and which is the nearest that it can.

vLLM owns the pages: it may begin one anywhere in a prompt, share it between requests and hand it on. So a recipe is
served if what a page stores can be computed from that page's keys and values, and read back, alone.
"""

from dataclasses import replace

from kvq_runtime.engines import nearest
from kvq_runtime.engines.nearest import Engine
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme


def refusal(recipe: Recipe, geometry: Geometry) -> str | None:
    """Why vLLM cannot serve the recipe on a model of this shape: a clause; None: it can."""
    if recipe.policies:
        kinds = ", ".join(policy.kind for policy in recipe.policies)
        return f"it chooses among tokens, or waits for a prompt ({kinds}), and vLLM decides which pages are held"
    if recipe.cross_layer:
        return "each layer is predicted from the decoded layer below, and vLLM's layers see their own pages alone"
    if recipe.position == "pre":
        return "keys are encoded before RoPE, and no kernel here turns them as it reads pages"
    for role, scheme in zip(("keys", "values") * len(recipe.pairs), recipe.schemes, strict=True):
        reason = _of_scheme(scheme, geometry)
        if reason is not None:
            return f"{role}: {reason}"
    return None


def _of_scheme(scheme: Scheme, geometry: Geometry) -> str | None:
    if scheme.axis == "channel":
        return "a code belongs to a channel of a whole block, and a page is written token by token"
    if scheme.correct is not None:
        return f"{scheme.correct.kind} corrects whole blocks, and a page is written token by token"
    try:
        scheme.quantize.check_tokens(geometry)
    except ValueError as error:
        return str(error).partition(",")[0]
    return None


VLLM = Engine("vLLM cannot serve", "serve", refusal)


def check(recipe: Recipe, geometry: Geometry) -> None:
    """Raise ValueError, a sentence that names the nearest recipe that can be served, unless this one can."""
    nearest.check(VLLM, recipe, geometry)


def paged(recipe: Recipe, tokens: int) -> Recipe:
    """The recipe with blocks of as many tokens as a page has."""
    return replace(recipe, window=replace(recipe.window, block=tokens))
