"""AQUA-KV: predict each layer's keys from the decoded keys below and its values from [decoded keys, values below];
store the residuals with HIGGS (or any other rounding). The first layer, which has nothing below, gets 4 bits.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; the rows of its tables 1, 5 and 9 are settings, of keys and values:

    position=post · window.sinks=0 · all.predict.storage=gptq4 · all.predict.fit=clean · key.predict=none
    value.predict.keys=false · key.predict.below=1,2 · key.predict=low_rank · layers.0.key.quantize.size=64
    key.predict=mlp+key.predict.hidden=width+key.predict.tokens=all      the MLP of the paper's size

`-first-16bit`: its setting for Qwen models.
Differs: the first layer's mean is removed too; HIGGS as in `higgs.py`. Predictors in 4 bits have groups of 64 inputs
with a step and a low end in 16 bits each, 4.5 bits a weight. KVSharer, which the paper compares with, has no recipe: it
takes a layer's cache for that of another, at any distance, where the chain of decoded layers holds the 3 below alone,
and only subtracts what it reads.
"""

from dataclasses import replace

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import higgs, polar, quarot, rtn, svdq, turboquant
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean

FAMILY = Family(
    papers={"AQUA-KV": "Shutova et al., 2025, arXiv 2501.19392"},
    golden=("aqua-2bit", "aqua-1bit", "aqua-1.5bit", "aqua-3bit", "aqua-4bit", "aqua-2bit-quarot",
            "aqua-2bit-first-16bit", "aqua-lloyd-2bit", "aqua-polar-3bit", "aqua-svdq-2bit",
            "aqua-2bit+key.predict=low_rank+value.predict=low_rank+name=aqua-2bit-rrr",
            "aqua-2bit+key.predict=mlp+value.predict=mlp+name=aqua-2bit-mlp",
            "aqua-2bit+all.predict.storage=gptq4+name=aqua-2bit-gptq", "aqua-2bit+position=post+name=aqua-2bit-post",
            "aqua-2bit+key.axis=channel+value.axis=channel+name=aqua-2bit-channel",
            "aqua-2bit+all.predict.below=1,2+name=aqua-2bit-below-1-2"),
    compared=("aqua-1bit", "aqua-2bit", "aqua-3bit", "aqua-2bit-quarot", "aqua-lloyd-2bit", "aqua-polar-3bit",
              "aqua-svdq-2bit"),
)  # fmt: skip

EXACT = Scheme(quantize=Exact())


def aqua(name: str, scheme: Scheme, first: Scheme, summary: str) -> Recipe:
    """AQUA-KV over any rounding: `scheme` for the predicted layers, `first` for layer 0."""
    predicted = replace(scheme, predict=Linear())
    if not first.quantize.keeps_dtype:
        first = replace(first, predict=Mean())
    return Recipe(f"aqua-{name}", predicted, predicted, "pre", {0: (first, first)}, summary)


def _first_16bit() -> list[Recipe]:
    """The paper's setting for Qwen models."""
    summaries = {"2bit": "AQUA-KV, 2 bits: first layer as it is"}
    summaries |= {bits: f"AQUA-KV over HIGGS, {bits}, first layer as it is" for bits in ("3bit", "4bit")}
    return [
        aqua(f"{bits}-first-16bit", higgs.scheme(bits), EXACT, summary=summary) for bits, summary in summaries.items()
    ]


def _combined() -> list[Recipe]:
    """Over other roundings, with their own 4 bits for the first layer, and over SVDq's keys, which nothing predicts."""
    over = {
        "2bit-quanto": (rtn.scheme(2), rtn.scheme(4), "AQUA-KV, 2 bits: over Quanto, groups of 64"),
        "2bit-quarot": (quarot.scheme(2), quarot.scheme(4), "AQUA-KV, 2 bits: over QuaRot"),
        "polar-3bit": (polar.scheme("3bit", "all"), polar.scheme("4bit", "all"), "AQUA-KV over polar-3bit"),
        "lloyd-2bit": (turboquant.scheme(2, "all"), turboquant.scheme(4, "all"), "AQUA-KV over lloyd-2bit"),
    }
    key, four = svdq.scheme(Mixed(target=2.0, codebook="uniform")), higgs.scheme("4bit")
    value = replace(higgs.scheme("2bit"), predict=Linear())
    layers, summary = (
        {0: (key, replace(four, predict=Mean()))},
        "keys of SVDq, 2bit, water-filled; values of AQUA-KV, 2 bits",
    )
    keys = Recipe("aqua-svdq-2bit", key, value, "pre", layers, summary)
    return [*(aqua(name, *schemes, summary=text) for name, (*schemes, text) in over.items()), keys]


def recipes() -> list[Recipe]:
    """The paper's bit widths, its sub-2-bit grids, a first layer in 16 bits, and combinations with other papers."""
    four = higgs.scheme("4bit")
    main = [
        aqua(bits, higgs.scheme(bits), four, summary=f"AQUA-KV over HIGGS, {bits}")
        for bits in higgs.GRIDS
        if "slow" not in bits
    ]
    return main + _first_16bit() + _combined()
