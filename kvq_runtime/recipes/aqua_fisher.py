"""AQUA-KV's prediction from two layers below, bases in the metric of the model's gradients, and bits shared out by it.

    r = x - f(keys and values of two layers below, own keys) → z = r B → trellis paths of z / g, bits by water-filling

    f   reads keys and values of two layers below, where there are two
    B   is in the metric of Fisher information: what an error costs in nats, through everything that reads it, for keys
        and values alike
    z   has trellis paths along a block's tokens, which leave 1.2 to 1.5 times less squared error than Lloyd–Max codes
    g   is a token's gain of 3 bits: what the calibrated deviations lack where text is of another kind

Bits of all layers, of keys and of values, are filled in one order by what errors cost.

With `+all.quantize.weighed=true`, as `auto` has it, paths are those of the least error as tokens count: how much, each
key or value tells itself, by a direction that is fitted to the lengths of gradients.

With `+all.predict.below=[1,2,3,4]` predictions read four layers: SmolLM2-135M diverged by a sixth less at 2.1 bits,
with 1.3 times the bytes that all tokens share and twice the products of a decode.

All layers share one budget, the first with them, so that bits in a name are the mean over all, gains included; others
are a setting, `aqua-fisher-1bit+all.quantize.target=0.6`. Predictors are stored in 4 bits, which cost 4.5 with their
scales. Bases have 16: in 4, what they lose themselves is more than what 3 bits lose. It costs a backward pass over a
part of the text, and a path search for each block that is encoded: these recipes are for bytes that are kept and read
often.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; Hong et al., 2025 (SVDq), sections 4.1 and 4.2; Theis et al., 2018
(Fisher information by one draw for each token); Tseng et al., 2024 (QTIP, arXiv 2406.11235), section 3; Cover and
Thomas, 2006, section 10.3.3 (reverse water-filling); Gersho and Gray, 1992, section 12.10 (shape and gain).
Differs: no paper has these together.
"""

from dataclasses import replace
from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes.fisher import WINDOW
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import GradientBasis

GAIN = 3
RIDGE = 1e-4


def aqua_fisher(name: str, bits: float) -> Recipe:
    """Return the recipe with `bits` bits per element, averaged over all layers, keys and values."""
    rounding = Mixed(target=bits, codebook="trellis", gain=GAIN, shared=True)
    two = Linear(below=(1, 2), both=True, ridge=RIDGE, storage="gptq4")
    scheme = Scheme(rounding, predict=two, rotate=GradientBasis())
    lower = [replace(scheme, predict=below) for below in (Mean(), replace(two, below=(1,)))]
    layers = {layer: (first, first) for layer, first in enumerate(lower)}
    summary = f"AQUA-KV, bases in the metric of gradients, trellis paths, {bits:g} bits"
    return Recipe(name, scheme, scheme, "pre", layers, summary, WINDOW)


FAMILY = Family(
    presets={f"aqua-fisher-{bits:g}bit": partial(aqua_fisher, bits=bits) for bits in (1.0, 2.0, 3.0)},
    compared=("aqua-fisher-1bit", "aqua-fisher-2bit", "aqua-fisher-3bit"),
)
