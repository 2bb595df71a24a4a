"""HIGGS: rotate by a signed Hadamard, then take the nearest point of a Gaussian grid. No calibration at all.

`mean-higgs-*` removes the calibrated mean of each channel first (AQUA-KV's "only bias" row, table 9): on models with
biased key projections that is most of AQUA-KV's gain, and it costs nothing at decode. `mean-higgs-head-*-post` have a
scale per head, and subtract the mean at position t, R_t μ, from keys after RoPE, so that the decode kernel can read
packed keys.

Source: Malinovskii et al., 2024 (HIGGS, arXiv 2411.17525), as used on caches by Shutova et al., 2025 (AQUA-KV), section
4.1.
Differs: signs, least-squares scales, and at least `recent` exact tokens at any time (their buffer empties at a flush).
"""

from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard

# bits per element → (dimension, points); "2bit-slow" is AQUA-KV's grid without a fast GPU kernel
GRIDS = {"1bit": (8, 256), "1.5bit": (4, 64), "2bit": (2, 16), "2bit-slow": (4, 256), "3bit": (2, 64), "4bit": (2, 256)}


def scheme(bits: str, group: str = "all", predict=None) -> Scheme:
    """Return a scheme of HIGGS at these bits, with one scale per token ("all") or per head."""
    dim, size = GRIDS[bits]
    return Scheme(quantize=Grid(dim, size, group), rotate=Hadamard(group), predict=predict)


def higgs(name: str, bits: str, group: str = "all") -> Recipe:
    """Keys after RoPE."""
    own, how = scheme(bits, group), "keys after RoPE" if group == "all" else "a scale per head"
    return Recipe(name, own, own, summary=f"HIGGS, {bits}, {how}")


def mean_higgs(name: str, bits: str) -> Recipe:
    """Keys before RoPE, the mean removed."""
    own = scheme(bits, predict=Mean())
    return Recipe(name, own, own, "pre", summary=f"HIGGS, {bits}, mean removed")


def mean_higgs_post(name: str, bits: str) -> Recipe:
    """Keys after RoPE, the mean removed, a scale per head."""
    own = scheme(bits, "head", Mean())
    return Recipe(name, own, own, summary=f"HIGGS, {bits}, a scale per head, mean removed after RoPE")


FAMILY = Family(
    presets={f"higgs-{bits}": partial(higgs, bits=bits) for bits in ("2bit", "3bit", "4bit")}
    | {f"higgs-head-{bits}": partial(higgs, bits=bits, group="head") for bits in ("2bit", "3bit", "4bit")}
    | {"mean-higgs-2bit": partial(mean_higgs, bits="2bit")}
    | {"mean-higgs-head-2bit-post": partial(mean_higgs_post, bits="2bit")},
    compared=("higgs-2bit", "higgs-3bit", "higgs-4bit", "mean-higgs-2bit"),
)
