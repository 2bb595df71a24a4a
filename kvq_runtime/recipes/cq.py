"""CQ: neighbouring channels of a token share one code, the nearest of a calibrated codebook of their own.

    cq-2c4b        2 channels to a code of 4 bits: 2 bits an element; keys before RoPE
    cq-4c8b        4 channels to 8 bits: 2 bits, and codebooks of 256 numbers a channel
    cq-8c8b        8 channels to 8 bits: 1 bit
    cq-8c8b-gain   the same, centroids as long as what they stand for (gain-shape k-means): on SmolLM2-135M no better
    aqua-cq-4c8b   what AQUA-KV's prediction leaves

A token stores its codes alone; all tokens share the codebooks, 512 bytes a channel with codes of 8 bits, 32 with 4.

Source: Zhang et al., 2024 (CQ, arXiv 2405.03917), section 3; "2c4b" is the paper's name of such a configuration.
Differs: centroids are learned without the weights of Fisher information; the first 4 and the 128 newest tokens stay
exact (theirs: none).
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import aqua
from kvq_runtime.stages.fitted_codebook import Coupled, Means

FAMILY = Family(
    papers={
        "CQ": "Zhang et al., 2024, arXiv 2405.03917",
        "GSRQ": "Kim et al., 2026, arXiv 2607.01065",
    },
    golden=("cq-2c4b",),
    compared=("cq-2c4b", "cq-4c8b", "cq-8c8b", "cq-8c8b-gain", "aqua-cq-4c8b"),
)
CODES = ((2, 4), (4, 8), (8, 8))


def scheme(channels: int, bits: int, means: Means = "euclidean") -> Scheme:
    """Per token, one code of `bits` bits for `channels` channels."""
    return Scheme(Coupled(channels, bits, means=means))


def recipes() -> list[Recipe]:
    """2 bits by pairs and by fours, 1 bit by eights; AQUA-KV with 4 bits for the first layer, by pairs."""
    found = []
    for channels, bits in CODES:
        stages, summary = scheme(channels, bits), f"CQ, {channels} channels to a code of {bits} bits"
        found.append(Recipe(f"cq-{channels}c{bits}b", stages, stages, "pre", summary=summary))
    stages, summary = scheme(8, 8, "gain-shape"), "CQ at 1 bit, lengths of centroids apart from directions (GSRQ)"
    found.append(Recipe("cq-8c8b-gain", stages, stages, "pre", summary=summary))
    summary = "AQUA-KV over CQ, 4 channels to a code of 8 bits"
    return [*found, aqua.aqua("cq-4c8b", scheme(4, 8), scheme(2, 8), summary=summary)]
