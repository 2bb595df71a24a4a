"""TurboQuant: rotate every head at random, then round each coordinate by the Lloyd–Max codebook of a sphere.

After a random rotation the coordinates of a vector are nearly independent, with the density of a coordinate on the
sphere, whatever the data: a scalar codebook and one norm per head suffice. It is the scalar case of HIGGS.

    turboquant-plain-3bit   as published: the norm of the vector
    turboquant-*            the decoded vector made as long as the original ("norm correction")
    lloyd-*                 after a signed Hadamard, with the least-squares scale: least squared error
    mean-lloyd-*-post       the same with the mean removed, as `mean-higgs-head-*-post`; before RoPE: `+position=pre`
    lloyd-even-2bit         by evenly spaced levels: 1% more squared error, and the decode kernel needs no table

Source: Zandieh et al., 2025 (TurboQuant, arXiv 2504.19874), algorithm 1; the correction as in vLLM's `turboquant_*_nc`
cache types; even levels: Max, 1960.
Differs: no residual sketch (see the stage), no extra bits for outlier channels: removing the mean gains more.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.codebook import Lloyd
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Even

FAMILY = Family(
    papers={
        "TurboQuant": "Zandieh et al., 2025, arXiv 2504.19874",
        "DRIVE": "scales, arXiv 2105.08339",
        "EDEN": "scales, arXiv 2108.08842",
    },
    golden=(
        "mean-lloyd-2bit-post+position=pre+name=mean-lloyd-2bit",
        "lloyd-1bit",
        "lloyd-even-2bit",
        "turboquant-3bit",
    ),
    compared=("lloyd-2bit", "lloyd-3bit", "turboquant-2bit", "turboquant-3bit"),
)

BITS = (1, 2, 3, 4)


def scheme(bits: int, group: str = "head", predict=None) -> Scheme:
    """A scheme of scalar Lloyd–Max after a Hadamard, with one least-squares scale per head, or per 1024 elements."""
    return Scheme(quantize=Lloyd(bits, group, "least_squares"), rotate=Hadamard(group), predict=predict)


def recipes() -> list[Recipe]:
    """1 to 4 bits; as published at 3, by even levels at 2."""
    found = []
    for bits in BITS:
        turbo = Scheme(quantize=Lloyd(bits), rotate=Random())
        lloyd, mean = scheme(bits), scheme(bits, predict=Mean())
        found.append(Recipe(f"turboquant-{bits}bit", turbo, turbo, summary=f"TurboQuant, {bits} bits, norms kept"))
        found.append(Recipe(f"lloyd-{bits}bit", lloyd, lloyd, summary=f"scalar Lloyd–Max, {bits} bits"))
        summary = f"the same, {bits} bits, mean removed after RoPE"
        found.append(Recipe(f"mean-lloyd-{bits}bit-post", mean, mean, summary=summary))
    plain = Scheme(quantize=Lloyd(3, scale="plain"), rotate=Random())
    even = Scheme(quantize=Even(2), rotate=Hadamard("head"))
    published = Recipe("turboquant-plain-3bit", plain, plain, summary="TurboQuant, 3 bits")
    return [*found, published, Recipe("lloyd-even-2bit", even, even, summary="evenly spaced levels, 2 bits")]
