"""AQUA-KV's prediction from keys and values, bases in the metric of the model's gradients, and bits shared out by it.

    r = x - f(keys and values below, this layer's keys) → z = r B → trellis paths of z / g, by water-filling

f, B, g and the sharing are those of `aqua_metric.py`, with two differences:

    B   in the metric of Fisher information: what an error costs in nats, through everything that reads it, for keys and
        values alike. `aqua-metric` weighs them by what the layer itself makes of them
    z   by trellis paths along a block's tokens, which leave 1.25 to 1.58 times less squared error than Lloyd–Max codes

All layers share one budget, the first with them, so that bits in a name are the mean over all, gains included. It costs
a backward pass over a part of the text, and a path search for each block that is encoded: these recipes are for bytes
that are kept and read often. `-gptq` stores predictors and bases in 4 bits.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; Hong et al., 2025 (SVDq), sections 4.1 and 4.2; Theis et al., 2018
(Fisher information by one draw for each token); Tseng et al., 2024 (QTIP), section 3; Cover and Thomas, 2006, section
10.3.3 (reverse water-filling).
Differs: no paper has these together.
"""

from dataclasses import replace

from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.recipes.aqua_metric import GAIN, in_four_bits
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import GradientBasis

WIDTHS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
PACKED = (0.5, 1.0, 2.0)  # of which there is one with predictors and bases in 4 bits


def recipe(bits: float) -> Recipe:
    """The recipe with so many bits per element, in the mean over all layers, keys and values."""
    rounding = Mixed(target=bits, codebook="trellis", gain=GAIN, shared=True)
    scheme = Scheme(rounding, predict=Linear(both=True), rotate=GradientBasis())
    first = replace(scheme, predict=Mean())
    summary = f"AQUA-KV from keys and values, bases in the metric of gradients, trellis paths, {bits:g} bits"
    return Recipe(f"aqua-fisher-{bits:g}bit", scheme, scheme, "pre", {0: (first, first)}, summary)


def recipes() -> list[Recipe]:
    """Half a bit to 4 bits; some with predictors and bases in 4 bits."""
    return [*map(recipe, WIDTHS), *(in_four_bits(recipe(bits)) for bits in PACKED)]
