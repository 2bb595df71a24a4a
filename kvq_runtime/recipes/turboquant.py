"""TurboQuant: rotate every head at random, then round each coordinate by the Lloyd–Max codebook of a sphere.

After a random rotation the coordinates of a vector are nearly independent, with the density of a coordinate on the
sphere, whatever the data: a scalar codebook and one norm per head suffice. It is the scalar case of HIGGS.

    turboquant-plain-3bit   as published: the norm of the vector
    turboquant-3bit         the decoded vector made as long as the original ("norm correction")
    lloyd-*                 after a signed Hadamard, with the least-squares scale: least squared error
    mean-lloyd-3bit-post    the same with the mean removed, as `mean-higgs-head-2bit-post`; before RoPE: `+position=pre`

Source: Zandieh et al., 2025 (TurboQuant, arXiv 2504.19874), algorithm 1; the correction as in vLLM's `turboquant_*_nc`
cache types.
Differs: no residual sketch (see the stage), no extra bits for outlier channels: removing the mean gains more.
"""

from functools import partial
from typing import Literal

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.codebook import Lloyd
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random

BITS = (1, 2, 3, 4)
Scale = Literal["norm", "plain"]


def scheme(bits: int, group: str = "head", predict=None) -> Scheme:
    """A scheme of scalar Lloyd–Max after a Hadamard, with one least-squares scale per head, or per 1024 elements."""
    return Scheme(quantize=Lloyd(bits, group, "least_squares"), rotate=Hadamard(group), predict=predict)


def turboquant(name: str, scale: Scale) -> Recipe:
    """3 bits after a random rotation."""
    rounded = Scheme(quantize=Lloyd(3, scale=scale), rotate=Random())
    return Recipe(name, rounded, rounded, summary="TurboQuant, 3 bits" + (", norms kept" if scale == "norm" else ""))


def lloyd(name: str, bits: int, predict: Mean | None = None) -> Recipe:
    """After a signed Hadamard; with the mean removed, if it is predicted."""
    rounded, how = scheme(bits, predict=predict), ", mean removed after RoPE" if predict else ""
    return Recipe(name, rounded, rounded, summary=f"scalar Lloyd–Max, {bits} bits{how}")


FAMILY = Family(
    presets={"turboquant-3bit": partial(turboquant, scale="norm")}
    | {"turboquant-plain-3bit": partial(turboquant, scale="plain")}
    | {f"lloyd-{bits}bit": partial(lloyd, bits=bits) for bits in (2, 3, 4)}
    | {"mean-lloyd-3bit-post": partial(lloyd, bits=3, predict=Mean())},
    compared=("lloyd-2bit", "lloyd-3bit", "turboquant-3bit"),
)
