"""WUSH-KV: the linear transform of each head whose rounding error costs attention least, then rounding.

    wush-*bit         plain rounding per token, one range for a head
    wush-higgs-2bit   the nearest point of a Gaussian grid, one scale for a head: neither paper has this

Keys are transformed after RoPE in the metric of the queries, values in that of the output projection.

Source: WUSH-KV, 2026 (arXiv 2609.38121).
Differs: the paper was not at hand; its formula of the transform is implemented, its quantizer and window may be others.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes.higgs import GRIDS
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.metric_rotation import Wush
from kvq_runtime.stages.rtn import Rtn

FAMILY = Family(
    look=("orange", "*"),
    papers={"WUSH-KV": "Chen et al., 2026, arXiv 2609.38121", "WUSH": "for weights, arXiv 2512.00956"},
    golden=("wush-2bit", "wush-higgs-2bit"),
    compared=("wush-2bit", "wush-higgs-2bit", "wush-3bit"),
    combined=("wush-higgs",),
)


def recipes() -> list[Recipe]:
    """2 and 3 bits by plain rounding, 2 by HIGGS's grid."""
    roundings = {
        "wush-2bit": (Rtn(2, "head"), "2 bits, plain rounding"),
        "wush-3bit": (Rtn(3, "head"), "3 bits, plain rounding"),
        "wush-higgs-2bit": (Grid(*GRIDS["2bit"], "head"), "2 bits, HIGGS's grid"),
    }
    found = []
    for name, (quantize, how) in roundings.items():
        keys, values = Scheme(quantize, rotate=Wush("queries")), Scheme(quantize, rotate=Wush("output"))
        found.append(Recipe(name, keys, values, summary=f"WUSH-KV, {how} per head"))
    return found
