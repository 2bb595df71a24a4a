"""H2O: hold the tokens that attention looks at most, here with what AQUA-KV, HIGGS or 16 bit make of them.

Selection comes before encoding, and fits know nothing of it: `aqua-h2o-2bit` has the tensors of `aqua-2bit`.

Source: Zhang et al., 2023 (H2O); Shutova et al., 2025 (AQUA-KV), tables 7 and 20: 20% and 50% of the tokens.
Differs: see `kvq_runtime/hitters.py`.
"""

from dataclasses import replace

from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.recipes import aqua, higgs
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.select import Heavy

SHARES = {"": 0.2, "-50": 0.5}


def recipes() -> list[Recipe]:
    """AQUA-KV at 2 bits, HIGGS at 2 bits and 16 bit, over a fifth and over half of the tokens."""
    two, four, exact = higgs.side("2bit"), higgs.side("4bit"), Side(Exact())
    over = {
        "aqua-h2o-2bit": aqua.aqua("2bit", two, four, summary="AQUA-KV, 2 bits"),
        "h2o-higgs-2bit": Recipe("higgs-2bit", two, two, summary="HIGGS, 2 bits"),
        "h2o": Recipe("exact", exact, exact, summary="16 bit"),
    }
    found = []
    for name, recipe in over.items():
        for suffix, share in SHARES.items():
            summary = f"{recipe.summary}, over the {share:.0%} of tokens that H2O holds"
            found.append(replace(recipe, name=name + suffix, select=Heavy(share), summary=summary))
    return found
