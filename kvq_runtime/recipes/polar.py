"""PolarQuant: rotate every head at random, then store its angles in recursive polar coordinates and few radii.

The rotation makes angles follow a known distribution, so nothing has to be normalized per group and one codebook fits
all. `polar-paper` is the paper's: four levels with 4, 2, 2, 2 bits and a 16-bit radius per 16 elements, 3.875 bits.
But that radius is a quarter of the bits, and scalar rounding reaches the same error with 3.1 bits (`lloyd-3bit`).
`polar-*bit` transform to the last level: one norm per head and 3.1 bits at the paper's widths, a tenth more error.
`polar-radius8` keeps four levels and stores 8-bit radii: 3.5 bits. The rotation has to be a random one: a Hadamard
makes neighbours equal where every other channel is nearly silent, and equal neighbours lie on a boundary of sectors.

Source: Han et al., 2025 (PolarQuant, arXiv 2502.02617), section 4.1; the rotation as in its footnote.
Differs: the paper encodes the prompt alone and keeps generated tokens in 16 bits; here every token that leaves the
recent window is encoded. Codebooks come from the exact density, which its k-means of sampled angles approximates;
`-fitted` have the paper's offline k-means, and `-fitted-plain` have it without the rotation, where the density of
angles is not known beforehand. Ours are one per level, layer and role (keys or values), of all heads. `polar-online`
has them from each row's own prompt, as the paper's online variant, by plain Lloyd steps from quantiles instead of
k-means++.
"""

from dataclasses import replace

from kvq_runtime.family import Claim, Family
from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.polar import Polar, PolarFitted
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random

FAMILY = Family(
    look=("indigo", "h"),
    papers={"PolarQuant": "Han et al., 2025, arXiv 2502.02617"},
    golden=("mean-polar-3bit", "polar-3bit-fitted-plain", "polar-hadamard", "polar-radius8"),
    compared=("polar-paper", "polar-paper-fitted", "polar-online", "polar-2.5bit", "polar-3bit"),
    claims=(
        Claim("PolarQuant: angles beat KIVI", "polar-paper", "kivi-2bit"),
        Claim("PolarQuant: codebooks of the prompt beat those of the exact density", "polar-online", "polar-paper"),
    ),
    varied=("mean-",),
    opposed=True,
)

PAPER = Window(sinks=0)
# name → bits of levels 1, 2, ...; the last is that of all further ones
WIDTHS = {"2.5bit": (3, 2, 2, 1), "3bit": (4, 2), "4bit": (5, 3)}


def scheme(bits: str, group: str = "head", predict=None) -> Scheme:
    """Angles with one norm per head, whose size is a power of two, or, of "all" heads, per 1024 elements."""
    quantize = Polar(WIDTHS[bits], levels=0, group=group, points="mean")
    return Scheme(quantize=quantize, rotate=Random(group), predict=predict)


def paper(**settings) -> Scheme:
    """A scheme of the paper's four levels, for head sizes that 16 divides."""
    return Scheme(quantize=Polar(**settings), rotate=Random())


def fitted(given: Scheme, rotation: Random | None) -> Scheme:
    """The scheme with codebooks from the calibration, after this rotation or none."""
    return replace(given, quantize=PolarFitted(**vars(given.quantize)), rotate=rotation)


def recipes() -> list[Recipe]:
    """The paper's, its cheaper radii, and all angles to the end, with or without the mean."""
    plain, radius = paper(), paper(radius="log8")
    hadamard = Scheme(quantize=Polar(points="mean"), rotate=Hadamard("head"))
    found = [
        Recipe("polar-paper", plain, plain, summary="PolarQuant as published, 3.875 bits", window=PAPER),
        Recipe("polar-hadamard", hadamard, hadamard, summary="PolarQuant, 4 levels after a Hadamard, 4 exact sinks"),
        Recipe("polar-radius8", radius, radius, summary="PolarQuant with 8-bit radii, 3.5 bits", window=PAPER),
    ]
    for bits in WIDTHS:
        full, mean = scheme(bits), scheme(bits, predict=Mean())
        found.append(Recipe(f"polar-{bits}", full, full, summary=f"PolarQuant to the last level, {bits}"))
        found.append(Recipe(f"mean-polar-{bits}", mean, mean, "pre", summary=f"the same, {bits}, mean removed"))
    for name, given, window in (("paper", plain, PAPER), ("3bit", scheme("3bit"), Window())):
        turned, bare = fitted(given, Random()), fitted(given, None)
        summary = f"polar-{name} with codebooks from the calibration's angles"
        found.append(Recipe(f"polar-{name}-fitted", turned, turned, summary=summary, window=window))
        summary += ", without a rotation"
        found.append(Recipe(f"polar-{name}-fitted-plain", bare, bare, summary=summary, window=window))
    for name, rotation in (("polar-online", Random()), ("polar-online-plain", None)):
        own = fitted(plain, rotation)
        summary = "PolarQuant with codebooks from each prompt's angles" + ("" if rotation else ", without a rotation")
        found.append(Recipe(name, own, own, summary=summary, window=PAPER, policies=(PromptFit(),)))
    return found
