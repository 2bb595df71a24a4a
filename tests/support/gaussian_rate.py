"""How far a Gaussian is from what it is rounded to, by bits: what a quantizer is held to on random data."""

import math

import torch

from kvq_runtime.codec.codec import Codec

# the error of Lloyd's and Max's quantizers, relative to the deviation (Max, 1960, table I), 8 bits by Panter and Dite
SLACK = {"mixed": 1.35} | dict.fromkeys(("rtn", "rtn_clipped", "separable", "sinkhorn", "nuq"), 1.6)  # others: 1.15
LLOYD_MAX = {0: 1.0, 1: 0.603, 2: 0.343, 3: 0.186, 4: 0.0975, 8: 0.0068}


def gaussian(bits: float) -> float:
    """The relative error at a number of bits, of codes alone, between those of the table on a log scale."""
    below = max(known for known in LLOYD_MAX if known <= bits)
    above = min((known for known in LLOYD_MAX if known > bits), default=below)
    share = (bits - below) / max(1, above - below)
    return LLOYD_MAX[below] ** (1 - share) * LLOYD_MAX[above] ** share


def most(codec: Codec) -> float:
    """The largest error a codec may leave of what it rounds, relative to that; below 1, which zeros would leave."""
    quantize, width = codec.scheme.quantize, codec.geometry.width
    if runs_of := getattr(quantize, "runs", None):  # of channels, each with bits of its own
        runs = runs_of(width)
        left = width - sum(count for count, _ in runs)  # channels of which nothing is stored
        expected = math.sqrt((sum(count * gaussian(bits) ** 2 for count, bits in runs) + left) / width)
    else:
        shape, _ = codec.fields(torch.bfloat16)["codes"]
        expected = gaussian(8 * math.prod(shape) / (codec.block * width))
    return min(0.99, SLACK.get(quantize.kind, 1.15) * expected)
