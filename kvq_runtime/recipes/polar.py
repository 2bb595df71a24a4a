"""PolarQuant: rotate every head at random, then store its angles in recursive polar coordinates and few radii.

The rotation makes angles follow a known distribution, so nothing has to be normalized per group and one codebook fits
all. `polar-paper` is the paper's: four levels with 4, 2, 2, 2 bits and a 16-bit radius per 16 elements, 3.875 bits.
But that radius is a quarter of the bill, and scalar rounding reaches the same error with 3.1 bits (`lloyd-3bit`).
`polar-*bit` transform to the end: one norm per head and 3.1 bits at the paper's widths, a tenth more error.
`polar-radius8` keeps four levels and stores 8-bit radii: 3.5 bits. The rotation has to be a random one: a Hadamard
makes neighbours equal where every other channel is nearly silent, and equal neighbours lie on a boundary of sectors.

Source: Han et al., 2025 (PolarQuant), section 4.1; the rotation as in its footnote.
Differs: the paper encodes the prompt alone and keeps generated tokens in 16 bits; here every token that leaves the
recent window is encoded. Codebooks come from the exact density, which its k-means of sampled angles approximates;
`-fitted` have the paper's offline k-means, and `-fitted-plain` have it without the rotation, where angles have no
density that is known beforehand. Ours are one per level, layer and side, of all heads. `polar-online` has them from
each row's own prompt, as the paper's online variant, by plain Lloyd steps from quantiles instead of k-means++.
"""

from dataclasses import replace

from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.online import FirstTokens
from kvq_runtime.stages.polar import Polar, PolarFitted
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random

# name → bits of levels 1, 2, ...; the last is that of all further ones
WIDTHS = {"2.5bit": (3, 2, 2, 1), "3bit": (4, 2), "4bit": (5, 3)}


def side(bits: str, group: str = "head", predict=None) -> Side:
    """A side of angles with one norm per head, whose size is a power of two, or, of "all" heads, per 1024 elements."""
    quantize = Polar(WIDTHS[bits], levels=0, group=group, points="mean")
    return Side(quantize=quantize, rotate=Random(group), predict=predict)


def paper(**settings) -> Side:
    """A side of the paper's four levels, for head sizes that 16 divides."""
    return Side(quantize=Polar(**settings), rotate=Random(), sinks=0)


def fitted(given: Side, rotation: Random | None) -> Side:
    """The side with codebooks from the calibration, after this rotation or none."""
    return replace(given, quantize=PolarFitted(**vars(given.quantize)), rotate=rotation)


def recipes() -> list[Recipe]:
    """The paper's, its cheaper radii, and all angles to the end, with or without the mean."""
    plain, radius = paper(), paper(radius="log8")
    hadamard = Side(quantize=Polar(points="mean"), rotate=Hadamard("head"))
    found = [
        Recipe("polar-paper", plain, plain, summary="PolarQuant as published, 3.875 bits"),
        Recipe("polar-hadamard", hadamard, hadamard, summary="PolarQuant, 4 levels after a Hadamard, 4 exact sinks"),
        Recipe("polar-radius8", radius, radius, summary="PolarQuant with 8-bit radii, 3.5 bits"),
    ]
    for bits in WIDTHS:
        full, mean = side(bits), side(bits, predict=Mean())
        found.append(Recipe(f"polar-{bits}", full, full, summary=f"PolarQuant to the last level, {bits}"))
        found.append(Recipe(f"mean-polar-{bits}", mean, mean, "pre", summary=f"the same, {bits}, mean removed"))
    for name, given in (("paper", plain), ("3bit", side("3bit"))):
        turned, bare = fitted(given, Random()), fitted(given, None)
        summary = f"polar-{name} with codebooks from the calibration's angles"
        found.append(Recipe(f"polar-{name}-fitted", turned, turned, summary=summary))
        found.append(Recipe(f"polar-{name}-fitted-plain", bare, bare, summary=f"{summary}, without a rotation"))
    for name, rotation in (("polar-online", Random()), ("polar-online-plain", None)):
        own = fitted(plain, rotation)
        summary = "PolarQuant with codebooks from each prompt's angles" + ("" if rotation else ", without a rotation")
        found.append(Recipe(name, own, own, summary=summary, online=FirstTokens()))
    return found
