"""HIGGS: rotate by a signed Hadamard, then take the nearest point of a Gaussian grid. No calibration at all.

`mean-higgs-*` removes the calibrated mean of each channel first (AQUA-KV's "only bias" row, table 9): on models with
biased key projections that is most of AQUA-KV's gain, and it costs nothing at decode. `mean-higgs-head-*-post` have a
scale per head, and subtract the mean at position t, R_t μ, from keys after RoPE, so that the decode kernel can read
packed keys.

Source: Malinovskii et al., 2024 (HIGGS, arXiv 2411.17525), as used on caches by Shutova et al., 2025 (AQUA-KV), section
4.1.
Differs: signs, least-squares scales, and at least `recent` exact tokens at any time (their buffer empties at a flush).
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard

FAMILY = Family(
    papers={"HIGGS": "Malinovskii et al., 2024, arXiv 2411.17525"},
    golden=("higgs-2bit", "mean-higgs-2bit", "mean-higgs-3bit"),
    compared=("higgs-2bit", "higgs-3bit", "higgs-4bit", "mean-higgs-2bit", "mean-higgs-3bit"),
)

# bits per element → (dimension, points); "2bit-slow" is AQUA-KV's grid without a fast GPU kernel
GRIDS = {"1bit": (8, 256), "1.5bit": (4, 64), "2bit": (2, 16), "2bit-slow": (4, 256), "3bit": (2, 64), "4bit": (2, 256)}


def scheme(bits: str, group: str = "all", predict=None) -> Scheme:
    """A scheme of HIGGS at these bits, with one scale per token ("all") or per head."""
    dim, size = GRIDS[bits]
    return Scheme(quantize=Grid(dim, size, group), rotate=Hadamard(group), predict=predict)


def recipes() -> list[Recipe]:
    """Plain, per head, and with the mean removed, before RoPE and, per head, after it."""
    found = []
    for bits in GRIDS:  # what a memory report compares fitted recipes with
        own = scheme(bits)
        found.append(Recipe(f"higgs-{bits}", own, own, summary=f"HIGGS, {bits}, keys after RoPE"))
    for bits in ("1bit", "1.5bit", "2bit", "3bit", "4bit"):
        head = scheme(bits, "head")
        found.append(Recipe(f"higgs-head-{bits}", head, head, summary=f"HIGGS, {bits}, a scale per head"))
    for bits in ("2bit", "3bit", "4bit"):
        mean = scheme(bits, predict=Mean())
        found.append(Recipe(f"mean-higgs-{bits}", mean, mean, position="pre", summary=f"HIGGS, {bits}, mean removed"))
    for bits in ("1bit", "2bit", "3bit", "4bit"):
        own, summary = scheme(bits, "head", Mean()), f"HIGGS, {bits}, a scale per head, mean removed after RoPE"
        found.append(Recipe(f"mean-higgs-head-{bits}-post", own, own, summary=summary))
    return found
