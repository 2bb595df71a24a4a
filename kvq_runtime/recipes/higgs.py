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

from kvq_runtime.recipe import Family, Position, Recipe, Scheme
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard

# bits per element → (dimension, points); "2bit-slow" is AQUA-KV's grid without a fast GPU kernel
GRIDS = {"1bit": (8, 256), "1.5bit": (4, 64), "2bit": (2, 16), "2bit-slow": (4, 256), "3bit": (2, 64), "4bit": (2, 256)}


def scheme(bits: str, group: str = "all", predict=None) -> Scheme:
    """Return a scheme of HIGGS at these bits, with one scale per token ("all") or per head."""
    dim, size = GRIDS[bits]
    return Scheme(quantize=Grid(dim, size, group), rotate=Hadamard(group), predict=predict)


def higgs(
    name: str, bits: str, group: str = "all", how: str = "keys after RoPE", position: Position = "post", predict=None
) -> Recipe:
    """Return HIGGS at these bits; `how` ends its summary."""
    rounded = scheme(bits, group, predict)
    return Recipe(name, rounded, rounded, position, summary=f"HIGGS, {bits}, {how}")


HEAD, MEAN = "a scale per head", Mean()
FAMILY = Family(
    presets={f"higgs-{bits}": partial(higgs, bits=bits) for bits in ("2bit", "3bit", "4bit")}
    | {f"higgs-head-{bits}": partial(higgs, bits=bits, group="head", how=HEAD) for bits in ("2bit", "3bit", "4bit")}
    | {
        "mean-higgs-2bit": partial(higgs, bits="2bit", how="mean removed", position="pre", predict=MEAN),
        "mean-higgs-head-2bit-post": partial(
            higgs, bits="2bit", group="head", how=f"{HEAD}, mean removed after RoPE", predict=MEAN
        ),
    },
    compared=("higgs-2bit", "higgs-3bit", "higgs-4bit", "mean-higgs-2bit"),
)
