"""OSCAR: rotate each head by the eigenvectors of what reads it and a Hadamard, clip, and round per token.

    oscar-*             keys in the metric of the queries after RoPE, values in that of the attention-weighted values
    oscar-output-2bit   values in the metric of the output projection instead

At 2 bits the largest 4% of a key's magnitudes, and 8% of a value's, are cut, as the authors serve it; at 3 bits, which
the paper does not have, nothing is. A code has 2 and two 16-bit numbers for a head: 2.25 bits for heads of 128.

Source: Zhou et al., 2026 (OSCAR, arXiv 2605.17757); thresholds 0.96 and 0.92 of the authors' code.
Differs: window and sinks are ours, as for every recipe (theirs: 64 sinks, 256 recent tokens). One rotation for each
cached head: see `stages/metric_rotation.py`.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.metric_rotation import Metric, Oscar
from kvq_runtime.stages.rtn import Clipped, Rtn

FAMILY = Family(
    papers={"OSCAR": "Zhou et al., 2026, arXiv 2605.17757"},
    golden=("oscar-2bit", "oscar-3bit+value.rotate.metric=output+name=oscar-output-3bit"),
    compared=("oscar-2bit", "oscar-output-2bit", "oscar-3bit"),
)

KEEP: dict[Metric, float] = {"queries": 0.96, "attended": 0.92, "output": 0.92}


def scheme(bits: int, metric: Metric) -> Scheme:
    """Rotated in that metric; clipped at 2 bits."""
    quantize = Clipped(bits, "head", keep=KEEP[metric]) if bits == 2 else Rtn(bits, "head")
    return Scheme(quantize, rotate=Oscar(metric))


def recipes() -> list[Recipe]:
    """2 bits as published and with values weighed by the output projection, and 3 bits."""
    two, three = scheme(2, "queries"), scheme(3, "queries")
    return [
        Recipe("oscar-2bit", two, scheme(2, "attended"), summary="OSCAR, 2 bits"),
        Recipe("oscar-output-2bit", two, scheme(2, "output"), summary="OSCAR, 2 bits, values weighed by Wo"),
        Recipe("oscar-3bit", three, scheme(3, "attended"), summary="OSCAR, 3 bits"),
    ]
