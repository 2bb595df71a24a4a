"""KVarN: rotate each head by a Hadamard, balance the variance of tokens and channels of every block, and round.

Keys are rounded per channel and values per token, as KIVI's; but a block of 128 tokens of a head has a scale for each
token and one for each channel, so that neither a loud token nor a loud channel widens the steps of others. Nothing is
fitted. "2 bits" are 2 and, with heads of 128, three 16-bit numbers for 128 elements: 2.375.

    kvarn-k4v2    4 bits for keys, 2 for values: what the authors serve
    kvarn-k2v2    the paper's 2 bits

Source: Müller et al., 2026 (KVarN, arXiv 2606.03458): the abstract, and the description and tests of the authors'
code (huawei-csl/KVarN); the paper's text was not at hand. 16 iterations, tiles of 128 tokens, scales in float16.
Differs: the Hadamard has random signs (public ports have none); the first 4 and the newest 128 to 255 tokens stay exact
(theirs: a pool of first and newest blocks). Others are in `stages/sinkhorn.py` and `ops/sinkhorn.py`.
"""

from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.sinkhorn import Sinkhorn


def kvarn(name: str, key: int, value: int) -> Recipe:
    """Return KVarN with so many bits for keys, and for values."""
    summary, rotation = f"KVarN, {key} bits for keys, {value} for values", Hadamard("head")
    keys = Scheme(Sinkhorn(key, "channel"), rotate=rotation)
    return Recipe(name, keys, Scheme(Sinkhorn(value), rotate=rotation), summary=summary)


FAMILY = Family(
    presets={f"kvarn-k{key}v{value}": partial(kvarn, key=key, value=value) for key, value in ((4, 4), (4, 2), (2, 2))},
    compared=("kvarn-k4v2",),
)
