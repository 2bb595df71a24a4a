"""AQUA-KV: predict each layer's keys from the decoded keys below and its values from [decoded keys, values below];
store the residuals with HIGGS (or any other rounding). The first layer, which has nothing below, gets 4 bits.

Source: Shutova et al., 2025 (AQUA-KV, arXiv 2501.19392), algorithm 1; the rows of its tables 1, 5 and 9 are settings,
of keys and values:

    position=post · window.sinks=0 · all.predict.storage=gptq4 · all.predict.fit=clean · key.predict=none
    value.predict.keys=false · key.predict.below=1,2 · key.predict=low_rank · layers.0.key.quantize.size=64
    key.predict=mlp+key.predict.hidden=width+key.predict.tokens=all      the MLP of the paper's size

`-first-16bit`: its setting for Qwen models. Over QuaRot it is
`aqua-2bit-quanto+all.quantize.group=all+all.rotate=hadamard`.
Differs: the first layer's mean is removed too; HIGGS as in `higgs.py`. Predictors in 4 bits have groups of 64 inputs
with a step and a low end in 16 bits each, 4.5 bits a weight. KVSharer, which the paper compares with, has no recipe: it
takes a layer's cache for that of another, at any distance, where the chain of decoded layers holds the 3 below alone,
and only subtracts what it reads.
"""

from dataclasses import replace
from functools import partial

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import higgs, rtn
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.predict import Linear, Mean

EXACT = Scheme(quantize=Exact())


def aqua(name: str, scheme: Scheme, first: Scheme, summary: str) -> Recipe:
    """AQUA-KV over any rounding: `scheme` for the predicted layers, `first` for layer 0."""
    predicted = replace(scheme, predict=Linear())
    if not first.quantize.keeps_dtype:
        first = replace(first, predict=Mean())
    return Recipe(name, predicted, predicted, "pre", {0: (first, first)}, summary)


def over_higgs(name: str, bits: str) -> Recipe:
    """Over HIGGS, the first layer at 4 bits."""
    return aqua(name, higgs.scheme(bits), higgs.scheme("4bit"), summary=f"AQUA-KV over HIGGS, {bits}")


def first_16bit(name: str) -> Recipe:
    """Return the paper's setting for Qwen models."""
    return aqua(name, higgs.scheme("2bit"), EXACT, summary="AQUA-KV, 2 bits: first layer as it is")


def over_quanto(name: str) -> Recipe:
    """Over Quanto, with its own 4 bits for the first layer."""
    return aqua(name, rtn.scheme(2), rtn.scheme(4), summary="AQUA-KV, 2 bits: over Quanto, groups of 64")


FAMILY = Family(
    presets={f"aqua-{bits}": partial(over_higgs, bits=bits) for bits in ("1bit", "2bit", "3bit")}
    | {"aqua-2bit-first-16bit": first_16bit, "aqua-2bit-quanto": over_quanto},
    compared=("aqua-1bit", "aqua-2bit", "aqua-3bit", "aqua-2bit-quanto"),
)
