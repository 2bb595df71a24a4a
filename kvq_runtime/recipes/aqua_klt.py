"""AQUA-KV's prediction, then SVDq's PCA basis of its residuals, for keys and for values.

    r = x - f(below, ...) → z = r B → Lloyd–Max of each latent channel, bits by reverse water-filling → escape

Neither paper has this. The variances of the residual's latent channels are as unequal as those of the keys themselves,
so that few bits suffice (B is the Karhunen–Loève transform of the residuals); deviations are calibrated, so that a
token has no scale of its own. A token far outside the calibrated ranges is stored by the 8-bit escape, one for each
block.

Bits in a name are those of a predicted layer, its escape slot included; the first layer has 4.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; Hong et al., 2025 (SVDq), sections 4.1 and 4.2; Cover and Thomas,
2006, section 10.3.3 (reverse water-filling).
Differs: values have a basis too (SVDq leaves them); all channels of a schedule are filled by their eigenvalues.
`value.rotate=output_basis` weighs the errors of values by the output projection. On the model it was measured on it
changes divergence by -6% to +3% and perplexity by less than its standard error, for a second matrix per layer.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme, Window
from kvq_runtime.recipes.aqua import aqua
from kvq_runtime.stages.correct import ESCAPE_BITS, Escape
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.rotate import Basis

FAMILY = Family(
    golden=(
        "aqua-klt-1bit",
        "aqua-klt-1bit+value.rotate=output_basis+layers.0.value.rotate=output_basis+name=aqua-klt-1bit-output",
    ),
    compared=("aqua-klt-1bit", "aqua-klt-1.5bit", "aqua-klt-2bit"),
)

WIDTHS = {"1bit": 1.0, "1.5bit": 1.5, "2bit": 2.0}


def scheme(bits: float) -> Scheme:
    """A scheme of `bits` bits per element, of which the escape slot takes its part."""
    escape, block = Escape(), Window().block
    return Scheme(Mixed(target=bits - escape.slots * ESCAPE_BITS / block), rotate=Basis(), correct=escape)


def recipes() -> list[Recipe]:
    """1 to 2 bits above a first layer of 4 bits."""
    return [
        aqua(f"klt-{name}", scheme(bits), scheme(4), summary=f"AQUA-KV over a basis of its residuals, {name}")
        for name, bits in WIDTHS.items()
    ]
