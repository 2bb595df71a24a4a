"""WUSH-KV: the linear transform of each head whose rounding error costs attention least, then rounding.

    wush-*          plain rounding per token, one range for a head
    wush-higgs-*    the nearest point of a Gaussian grid, one scale for a head: neither paper has this

Keys are transformed after RoPE in the metric of the queries, values in that of the output projection.

Source: WUSH-KV, 2026 (arXiv 2609.38121).
Differs: the paper was not at hand; its formula of the transform is implemented, its quantizer and window may be others.
"""

from kvq_runtime.family import Family
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.recipes.higgs import GRIDS
from kvq_runtime.stages.grid import Grid
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
    """2, 3 and 4 bits, by plain rounding and by HIGGS's grid."""
    found = []
    for bits in (2, 3, 4):
        for name, quantize in (("wush", Rtn(bits, "head")), ("wush-higgs", Grid(*GRIDS[f"{bits}bit"], "head"))):
            keys, values = Scheme(quantize, rotate=Wush("queries")), Scheme(quantize, rotate=Wush("output"))
            rounding = "HIGGS's grid" if isinstance(quantize, Grid) else "plain rounding"
            summary = f"WUSH-KV, {bits} bits, {rounding} per head"
            found.append(Recipe(f"{name}-{bits}bit", keys, values, summary=summary))
    return found
