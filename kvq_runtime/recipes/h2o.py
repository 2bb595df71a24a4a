"""H2O: hold the tokens with the most attention and evict the others; held ones are stored by AQUA-KV, HIGGS or 16 bit.

Tokens are evicted before encoding, and fits do not depend on it: `aqua-h2o-2bit` has the tensors of `aqua-2bit`.

    -50       half of the tokens instead of a fifth
    -halves   the paper's split of that share: half of it the newest tokens, which stay exact until they are chosen from

Source: Zhang et al., 2023 (H2O); Shutova et al., 2025 (AQUA-KV), tables 7 and 20: 20% and 50% of the tokens.
Differs: see `kvq_runtime/policies/heavy_hitters.py`.
"""

from dataclasses import replace

from kvq_runtime.family import Family
from kvq_runtime.policies.heavy_hitters import HeavyHitters
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.recipes import aqua, higgs
from kvq_runtime.stages.exact import Exact

FAMILY = Family(
    look=("grey", "*"),
    papers={"H2O": "Zhang et al., 2023, arXiv 2306.14048"},
    golden=("aqua-h2o-2bit",),
    compared=("aqua-h2o-2bit", "h2o"),
    combined=("aqua-h2o",),
)

POLICIES = {"": HeavyHitters(0.2), "-50": HeavyHitters(0.5), "-halves": HeavyHitters(0.2, 0.1)}
BITS = {"2bit": "2 bits", "3bit": "3 bits", "4bit": "4 bits"}


def recipes() -> list[Recipe]:
    """AQUA-KV and HIGGS at 2 to 4 bits, and 16 bit, over a fifth and over half of the tokens."""
    four, exact = higgs.scheme("4bit"), Scheme(Exact())
    over: dict[str, Recipe] = {}
    for name, bits in BITS.items():
        scheme = higgs.scheme(name)
        over[f"aqua-h2o-{name}"] = aqua.aqua(name, scheme, four, summary=f"AQUA-KV, {bits}")
        over[f"h2o-higgs-{name}"] = Recipe(f"higgs-{name}", scheme, scheme, summary=f"HIGGS, {bits}")
    over["h2o"] = Recipe("exact", exact, exact, summary="16 bit")
    found = []
    for name, recipe in over.items():
        for suffix, policy in POLICIES.items():
            if suffix == "-halves" and name.endswith(("3bit", "4bit")):
                continue
            how = ", half of them the newest" if policy.recent else ""
            summary = f"{recipe.summary}, over the {policy.share:.0%} of tokens that H2O holds{how}"
            found.append(replace(recipe, name=name + suffix, policies=(policy,), summary=summary))
    return found
