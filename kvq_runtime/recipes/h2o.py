"""H2O: hold the tokens with the most attention and evict the others; held ones are stored by AQUA-KV, HIGGS or 16 bit.

Tokens are evicted before encoding, and fits do not depend on it: `aqua-h2o-2bit` has the tensors of `aqua-2bit`.

Source: Zhang et al., 2023 (H2O); Shutova et al., 2025 (AQUA-KV), tables 7 and 20: 20% and 50% of the tokens.
Differs: see `kvq_runtime/policies/heavy_hitters.py`.
"""

from dataclasses import replace

from kvq_runtime.policies.heavy_hitters import HeavyHitters
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.recipes import aqua, higgs
from kvq_runtime.stages.exact import Exact

SHARES = {"": 0.2, "-50": 0.5}


def recipes() -> list[Recipe]:
    """AQUA-KV at 2 bits, HIGGS at 2 bits and 16 bit, over a fifth and over half of the tokens."""
    two, four, exact = higgs.scheme("2bit"), higgs.scheme("4bit"), Scheme(Exact())
    over = {
        "aqua-h2o-2bit": aqua.aqua("2bit", two, four, summary="AQUA-KV, 2 bits"),
        "h2o-higgs-2bit": Recipe("higgs-2bit", two, two, summary="HIGGS, 2 bits"),
        "h2o": Recipe("exact", exact, exact, summary="16 bit"),
    }
    found = []
    for name, recipe in over.items():
        for suffix, share in SHARES.items():
            summary = f"{recipe.summary}, over the {share:.0%} of tokens that H2O holds"
            found.append(replace(recipe, name=name + suffix, policies=(HeavyHitters(share),), summary=summary))
    return found
