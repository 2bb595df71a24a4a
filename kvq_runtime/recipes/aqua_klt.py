"""AQUA-KV's prediction, then SVDq's PCA basis of its residuals, for keys and for values.

    r = x - f(below, ...) → z = r B → Lloyd–Max of each latent channel, bits by reverse water-filling → escape

Neither paper has this. The variances of the residual's latent channels are as unequal as those of the keys themselves,
so that few bits suffice (B is the Karhunen–Loève transform of the residuals); deviations are calibrated, so that a
token has no scale of its own. A token far outside the calibrated ranges is stored by the 8-bit escape, one for each
block.

Bits in a name are those of a predicted layer, its escape slot included; the first layer has 4, or 3.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; Hong et al., 2025 (SVDq), sections 4.1 and 4.2; Cover and Thomas,
2006, section 10.3.3 (reverse water-filling).
Differs: values have a basis too (SVDq leaves them); all channels of a schedule are filled by their eigenvalues.
`-output` weighs the errors of values by the output projection. On the model it was measured on it changes divergence by
-6% to +3% and perplexity by less than its standard error, for a second matrix per layer: it is no default.
"""

from dataclasses import replace

from kvq_runtime.family import Claim, Family
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.recipes.aqua import aqua
from kvq_runtime.stages.escape import BITS, Escape
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.rotate import Basis, OutputBasis

FAMILY = Family(
    look=("red", "D"),
    golden=("aqua-klt-1bit", "aqua-klt-1bit-output"),
    compared=("aqua-klt-1bit", "aqua-klt-1.5bit", "aqua-klt-2bit"),
    claims=(Claim("here: bases of AQUA-KV's residuals beat its grid", "aqua-klt-2bit", "aqua-2bit"),),
    combined=("aqua-klt",),
)

WIDTHS = {"1bit": 1.0, "1.25bit": 1.25, "1.5bit": 1.5, "2bit": 2.0}


def scheme(bits: float) -> Scheme:
    """A scheme of so many bits per element, of which the escape slot takes its part."""
    escape, block = Escape(), Window().block
    return Scheme(Mixed(target=bits - escape.slots * BITS / block), rotate=Basis(), correct=escape)


def recipes() -> list[Recipe]:
    """1 to 2 bits above a first layer of 4 bits, and the lowest above one of 3."""
    found = [
        aqua(f"klt-{name}", scheme(bits), scheme(4), summary=f"AQUA-KV over a basis of its residuals, {name}")
        for name, bits in WIDTHS.items()
    ]
    low = aqua(
        "klt-1bit-first-3bit", scheme(1), scheme(3), summary="AQUA-KV over a basis of its residuals, first 3 bits"
    )
    return [*found, low, weighed("1bit")]


def weighed(name: str) -> Recipe:
    """The recipe of these bits with values in an output basis."""
    plain = aqua(
        f"klt-{name}-output", scheme(WIDTHS[name]), scheme(4), summary=f"the same, {name}, values weighed by Wo"
    )
    first_key, first_value = plain.layers[0]
    layers = {0: (first_key, replace(first_value, rotate=OutputBasis()))}
    return replace(plain, value=replace(plain.value, rotate=OutputBasis()), layers=layers)
