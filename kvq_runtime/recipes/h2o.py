"""H2O: hold the tokens with the most attention and evict the others; held ones are stored by AQUA-KV, HIGGS or 16 bit.

Tokens are evicted before encoding, and fits do not depend on it: `aqua-h2o-2bit` has the tensors of `aqua-2bit`. Any
recipe holds fewer tokens by a setting, `higgs-4bit+policies.heavy=on+policies.heavy.share=0.5`.

    h2o-50       half of the tokens instead of a fifth
    h2o-halves   the paper's split of that share: half of it the newest tokens, which stay exact until they are chosen

Source: Zhang et al., 2023 (H2O); Shutova et al., 2025 (AQUA-KV), tables 7 and 20: 20% and 50% of the tokens.
Differs: see `kvq_runtime/policies/heavy_hitters.py`.
"""

from dataclasses import replace

from kvq_runtime.policies.heavy_hitters import HeavyHitters
from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import aqua, higgs
from kvq_runtime.stages.exact import Exact

FAMILY = Family(
    look=("grey", "*"),
    papers={"H2O": "Zhang et al., 2023, arXiv 2306.14048"},
    golden=("aqua-h2o-2bit",),
    compared=("aqua-h2o-2bit", "h2o"),
    combined=("aqua-h2o",),
)

FIFTH = HeavyHitters(0.2)


def recipes() -> list[Recipe]:
    """16 bit over a fifth and over half of the tokens, and with the paper's split; AQUA-KV and HIGGS over a fifth."""
    two, exact = higgs.scheme("2bit"), Scheme(Exact())
    over = [
        (aqua.aqua("h2o-2bit", two, higgs.scheme("4bit"), "AQUA-KV, 2 bits"), FIFTH),
        (Recipe("h2o-higgs-2bit", two, two, summary="HIGGS, 2 bits"), FIFTH),
    ]
    policies = {"h2o": FIFTH, "h2o-50": HeavyHitters(0.5), "h2o-halves": HeavyHitters(0.2, recent=0.1)}
    over += [(Recipe(name, exact, exact, summary="16 bit"), policy) for name, policy in policies.items()]
    found = []
    for recipe, policy in over:
        how = ", half of them the newest" if policy.recent else ""
        summary = f"{recipe.summary}, over the {policy.share:.0%} of tokens that H2O holds{how}"
        found.append(replace(recipe, policies=(policy,), summary=summary))
    return found
