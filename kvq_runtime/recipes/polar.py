"""PolarQuant: rotate every head at random, then store its angles in recursive polar coordinates and few radii.

The rotation makes angles follow a known distribution, so nothing has to be normalized per group and one codebook fits
all. `polar-paper` is the paper's: four levels with 4, 2, 2, 2 bits and a 16-bit radius per 16 elements, 3.875 bits.
But that radius is a quarter of the bits, and scalar rounding reaches the same error with 3.1 bits (`lloyd-3bit`).
`polar-3bit` transforms to the last level: one norm per head and 3.1 bits at the paper's widths, a tenth more error.
The rotation has to be a random one: a
Hadamard makes neighbours equal where every other channel is nearly silent, and equal neighbours lie on a boundary of
sectors.

Source: Han et al., 2025 (PolarQuant, arXiv 2502.02617), section 4.1; the rotation as in its footnote.
Differs: the paper encodes the prompt alone and keeps generated tokens in 16 bits; here every token that leaves the
recent window is encoded. Codebooks come from the exact density, which its k-means of sampled angles approximates;
`polar-paper-fitted` has the paper's offline k-means, and with `+all.rotate=none` has it without the rotation, where the
density of angles is not known beforehand. Ours are one per level, layer and role (keys or values), of all heads.
`polar-online` has them from each row's own prompt, as the paper's online variant, by plain Lloyd steps from quantiles
instead of k-means++.
"""

from functools import partial

from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Family, Recipe, Scheme, Window
from kvq_runtime.stages.polar import Polar, PolarFitted
from kvq_runtime.stages.rotate import Random

PAPER = Window(sinks=0)


def polar(name: str, quantize: Polar, summary: str, window: Window = PAPER, policies=()) -> Recipe:
    """Return PolarQuant after a random rotation of every head."""
    rotated = Scheme(quantize=quantize, rotate=Random())
    return Recipe(name, rotated, rotated, summary=summary, window=window, policies=policies)


FULL = Polar((4, 2), levels=0, points="mean")  # to the last level, one norm per head, whose size is a power of two
CODEBOOKS = "PolarQuant with codebooks from {} angles"
FAMILY = Family(
    presets={
        "polar-paper": partial(polar, quantize=Polar(), summary="PolarQuant as published, 3.875 bits"),
        "polar-3bit": partial(polar, quantize=FULL, summary="PolarQuant to the last level, 3bit", window=Window()),
        "polar-paper-fitted": partial(polar, quantize=PolarFitted(), summary=CODEBOOKS.format("the calibration's")),
        "polar-online": partial(
            polar, quantize=PolarFitted(), summary=CODEBOOKS.format("each prompt's"), policies=(PromptFit(),)
        ),
    },
    compared=("polar-paper", "polar-paper-fitted", "polar-online", "polar-3bit"),
)
