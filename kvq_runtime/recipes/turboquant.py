"""TurboQuant: rotate every head at random, then round each coordinate by the Lloyd–Max codebook of a sphere.

After a random rotation the coordinates of a vector are nearly independent, with the density of a coordinate on the
sphere, whatever the data: a scalar codebook and one norm per head suffice. It is the scalar case of HIGGS.

    turboquant-plain-*   as published: the norm of the vector
    turboquant-*         the decoded vector made as long as the original ("norm correction")
    lloyd-*              after a signed Hadamard, with the least-squares scale: least squared error
    mean-lloyd-*         the same before RoPE, with the mean removed; *-post: after RoPE, as `mean-higgs-head-*-post`
    *-even-2bit          by evenly spaced levels: 1% more squared error, and the decode kernel needs no table

Source: Zandieh et al., 2025 (TurboQuant, arXiv 2504.19874), algorithm 1; the correction as in vLLM's `turboquant_*_nc`
cache types; even levels: Max, 1960.
Differs: no residual sketch (see the stage), no extra bits for outlier channels: removing the mean gains more.
"""

from kvq_runtime.family import Claim, Family
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.even import Even
from kvq_runtime.stages.lloyd import Lloyd
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random

FAMILY = Family(
    look=("indigo", "v"),
    papers={
        "TurboQuant": "Zandieh et al., 2025, arXiv 2504.19874",
        "DRIVE": "scales, arXiv 2105.08339",
        "EDEN": "scales, arXiv 2108.08842",
    },
    golden=("mean-lloyd-2bit", "lloyd-1bit", "lloyd-even-2bit", "turboquant-3bit"),
    compared=("lloyd-2bit", "lloyd-3bit", "turboquant-2bit", "turboquant-3bit"),
    claims=(Claim("TurboQuant: an optimal scalar grid beats PolarQuant", "turboquant-3bit", "polar-paper"),),
    varied=("mean-",),
)

BITS = (1, 2, 3, 4)


def scheme(bits: int, group: str = "head", predict=None) -> Scheme:
    """A scheme of scalar Lloyd–Max after a Hadamard, with one least-squares scale per head, or per 1024 elements."""
    return Scheme(quantize=Lloyd(bits, group, "least_squares"), rotate=Hadamard(group), predict=predict)


def recipes() -> list[Recipe]:
    """1 to 4 bits; the published scale where others use it, at 2 to 4."""
    found = []
    for bits in BITS:
        turbo = Scheme(quantize=Lloyd(bits), rotate=Random())
        plain = Scheme(quantize=Lloyd(bits, scale="plain"), rotate=Random())
        lloyd, mean = scheme(bits), scheme(bits, predict=Mean())
        found.append(Recipe(f"turboquant-{bits}bit", turbo, turbo, summary=f"TurboQuant, {bits} bits, norms kept"))
        if bits > 1:
            found.append(Recipe(f"turboquant-plain-{bits}bit", plain, plain, summary=f"TurboQuant, {bits} bits"))
        found.append(Recipe(f"lloyd-{bits}bit", lloyd, lloyd, summary=f"scalar Lloyd–Max, {bits} bits"))
        found.append(Recipe(f"mean-lloyd-{bits}bit", mean, mean, "pre", summary=f"the same, {bits} bits, mean removed"))
        summary = f"the same, {bits} bits, mean removed after RoPE"
        found.append(Recipe(f"mean-lloyd-{bits}bit-post", mean, mean, summary=summary))
    for start, predict, summary in (("", None, ""), ("mean-", Mean(), ", mean removed after RoPE")):
        even = Scheme(quantize=Even(2), rotate=Hadamard("head"), predict=predict)
        name = f"{start}lloyd-even-2bit" + "-post" * bool(predict)
        found.append(Recipe(name, even, even, summary="evenly spaced levels, 2 bits" + summary))
    return found
