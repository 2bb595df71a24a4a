"""AQUA-KV: predict each layer's keys from the decoded keys below and its values from [decoded keys, values below];
store the residuals with HIGGS (or any other rounding). The first layer, which has nothing below, gets 4 bits.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; the variants are the rows of its tables 1, 5 and 9.
`-first-16bit`: its setting for Qwen models.
Differs: the first layer's mean is removed too; HIGGS as in `higgs.py`. `-gptq` has groups of 64 inputs with a step and
a low end in 16 bits each, 4.5 bits a weight. The MLP of the paper's size is `-mlp-paper`; `-mlp` and `-mlp-no-norm` are
wider for values, and fitted to 4096 tokens. KVSharer, which the paper compares with, has no recipe: it takes a layer's
cache for that of another, at any distance, where the chain of decoded layers holds the 3 below alone, and only
subtracts what it reads.
"""

from dataclasses import replace
from typing import Literal

from kvq_runtime.family import Claim, Family
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.recipes import higgs, polar, quarot, rtn, svdq, turboquant
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.predict import MLP, Linear, LowRank, Mean

FAMILY = Family(
    look=("blue", "o"),
    papers={"AQUA-KV": "Shutova et al., 2025, arXiv 2501.19392"},
    golden=("aqua-2bit", "aqua-1bit", "aqua-1.5bit", "aqua-3bit", "aqua-4bit", "aqua-2bit-rrr", "aqua-2bit-mlp",
            "aqua-2bit-gptq", "aqua-2bit-post", "aqua-2bit-quarot", "aqua-2bit-channel", "aqua-2bit-below-1-2",
            "aqua-2bit-first-16bit", "aqua-lloyd-2bit", "aqua-polar-3bit", "aqua-svdq-2bit"),
    compared=("aqua-1bit", "aqua-2bit", "aqua-3bit", "aqua-2bit-quarot", "aqua-lloyd-2bit", "aqua-polar-3bit",
              "aqua-svdq-2bit"),
    claims=(
        Claim("AQUA-KV: predicting from the layer below beats the same grid alone", "aqua-2bit", "higgs-2bit"),
        Claim("AQUA-KV: and so at 3 bits", "aqua-3bit", "higgs-3bit"),
        Claim("AQUA-KV: at 2 bits it beats KIVI at 2 bits", "aqua-2bit", "kivi-2bit"),
    ),
    combined=("aqua-polar", "aqua-lloyd", "aqua-svdq", "aqua-2bit-quarot"),
    opposed=True,
)  # fmt: skip

PAPER_MLP = MLP(hidden="width", tokens="all")
EXACT = Scheme(quantize=Exact())


def aqua(
    name: str, scheme: Scheme, first: Scheme, key=None, value=None, position: Literal["pre", "post"] = "pre", summary=""
) -> Recipe:
    """AQUA-KV over any rounding: `scheme` for the predicted layers, `first` for layer 0."""
    keys = replace(scheme, predict=key if key is not None else Linear())
    values = replace(scheme, predict=value if value is not None else Linear())
    if not first.quantize.keeps_dtype:
        first = replace(first, predict=Mean())
    return Recipe(f"aqua-{name}", keys, values, position, {0: (first, first)}, summary or f"AQUA-KV, {name}")


def _variants() -> list[Recipe]:
    two, four, plain = higgs.scheme("2bit"), higgs.scheme("4bit"), Linear()
    unpredicted, channel = (replace(two, predict=None) for _ in range(2))
    channel = replace(two, axis="channel")

    def of(name: str, summary: str, first: Scheme = four, scheme: Scheme = two, **settings) -> Recipe:
        return aqua(f"2bit-{name}", scheme, first, summary=f"AQUA-KV, 2 bits: {summary}", **settings)

    def inputs(name: str, summary: str, **settings) -> Recipe:
        return of(name, summary, key=Linear(below=settings.get("below", (1,))), value=Linear(**settings))

    return [
        of("agnostic", "fitted on exact inputs, for any rounding", key=Linear(fit="clean"), value=Linear(fit="clean")),
        of("rrr", "reduced-rank, 256", key=LowRank(), value=LowRank()),
        of("mlp", "two-layer MLP (reference)", key=MLP(), value=MLP()),
        of("mlp-paper", "two-layer MLP of the paper's width, fitted to all tokens", key=PAPER_MLP, value=PAPER_MLP),
        of("mlp-no-norm", "two-layer MLP without normalization", key=MLP(norm="none"), value=MLP(norm="none")),
        of("gptq", "predictors in 4 bits", key=Linear(storage="gptq4"), value=Linear(storage="gptq4")),
        of("mean", "only the mean", key=Mean(), value=Mean()),
        of("first-16bit", "first layer as it is", first=EXACT),
        of("first-3bit", "first layer 3 bits", first=higgs.scheme("3bit")),
        of("first-2bit", "first layer 2 bits", first=two),
        of("slow", "the d=4 grid", scheme=higgs.scheme("2bit-slow")),
        replace(of("sinks-0", "no exact sinks"), window=Window(sinks=0)),
        replace(of("sinks-64", "64 exact sinks"), window=Window(sinks=64)),
        replace(of("no-value", "values unpredicted"), value=unpredicted),
        replace(of("no-key", "keys unpredicted"), key=unpredicted),
        inputs("no-keys-to-values", "values from values below alone", keys=False),
        of("no-values-to-values", "values from keys alone", key=plain, value=Linear(below=())),
        inputs("below-1-2", "inputs from both layers below", below=(1, 2)),
        inputs("below-2", "inputs from two layers below alone", below=(2,)),
        of("post", "keys after RoPE", position="post"),
        of("channel", "HIGGS per channel", scheme=channel),
        of("quanto", "over Quanto, groups of 64", scheme=rtn.scheme(2), first=rtn.scheme(4)),
        of("quanto-post", "over Quanto, keys after RoPE", scheme=rtn.scheme(2), first=rtn.scheme(4), position="post"),
        of("quanto-1024", "over Quanto, one group per token", scheme=rtn.scheme(2, "all"), first=rtn.scheme(4, "all")),
        of("quarot", "over QuaRot", scheme=quarot.scheme(2), first=quarot.scheme(4)),
    ]


def _first_16bit() -> list[Recipe]:
    """The paper's setting for Qwen at 3 and 4 bits."""
    summary = "AQUA-KV over HIGGS, {}, first layer as it is"
    return [
        aqua(f"{bits}-first-16bit", higgs.scheme(bits), EXACT, summary=summary.format(bits))
        for bits in ("3bit", "4bit")
    ]


def _combined() -> list[Recipe]:
    """Over PolarQuant and scalar Lloyd–Max, all heads together, with their own 4 bits for the first layer."""
    schemes = [(f"polar-{bits}", polar.scheme(bits, "all"), polar.scheme("4bit", "all")) for bits in polar.WIDTHS]
    schemes += [
        (f"lloyd-{bits}bit", turboquant.scheme(bits, "all"), turboquant.scheme(4, "all")) for bits in turboquant.BITS
    ]
    over = [aqua(name, scheme, first, summary=f"AQUA-KV over {name}") for name, scheme, first in schemes]
    return [*over, *(_svdq_keys(bits) for bits in ("2bit", "1.25bit"))]


def _svdq_keys(bits: str) -> Recipe:
    """SVDq's keys, which nothing predicts, and values predicted from them and from the values below."""
    key, four = svdq.scheme(Mixed(target=svdq.FILLED[bits], codebook="uniform")), higgs.scheme("4bit")
    value = replace(higgs.scheme("2bit"), predict=Linear())
    summary = f"keys of SVDq, {bits}, water-filled; values of AQUA-KV, 2 bits"
    layers = {0: (key, replace(four, predict=Mean()))}
    return Recipe(f"aqua-svdq-{bits}", key, value, "pre", layers, summary)


def recipes() -> list[Recipe]:
    """The paper's bit widths, its sub-2-bit grids, its ablations at 2 bits, and combinations with other papers."""
    four = higgs.scheme("4bit")
    main = [
        aqua(bits, higgs.scheme(bits), four, summary=f"AQUA-KV over HIGGS, {bits}")
        for bits in higgs.GRIDS
        if "slow" not in bits
    ]
    return main + _variants() + _first_16bit() + _combined()
