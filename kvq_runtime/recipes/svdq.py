"""SVDq: PCA of all heads' keys before RoPE; each latent channel is rounded with bits by its variance.

    mean μ → z = (k - μ) B → bits by latent channel, in the order of the eigenvalues, down to none

The paper's schedules give 8 equal runs of channels their bits. `svdq-wf-*` find them for any total by reverse
water-filling on the eigenvalues: bit by bit, each where it lowers the error most. Values stay at 16 bits, or take 4
bits per token (`-v4`). `svdq-*-block` takes ranges from each block of tokens, the nearest to the paper's "all tokens"
that a growing cache allows. `svdq-online-*` decompose each row's own prompt, with the paper's schedules.

Source: Hong et al., 2025 (SVDq), algorithm 1, equations 4 and 6, table 1.
Differs: mean, basis and ranges come from calibration, once, and cost nothing per prompt; the paper decomposes each
prompt and counts the bits of neither basis nor ranges. Online ones do as the paper does and count both, for every row:
2 R bytes a channel, as much as R tokens of 16-bit keys. Decode-time tokens are encoded too; the paper keeps them in 16
bit. Ranges leave the exact sinks out and are clipped where that lowers the error; the paper's, of all tokens, are
stretched by one outlier.

`svdq-shadow-*` reads by chunks, as ShadowKV does: the paper's "SVDq+Sparsity" (tables 3 and 5: 2.25, 1.75 and 1.25
bits), a budget of 2048 tokens; `svdq-shadow-online-*` with the basis of each prompt, as published. All tokens are held;
landmarks add 2 bits per key element of a 16-bit model, which the paper does not count. Chunks alone are
`exact+policies.chunks=on`; ShadowKV's own keys, of rank 160 in 16 bits, have no recipe: latent channels take 8 at most.
`svdq-shadow-2bit-v4-128` reads 128 tokens and 4 outlier chunks, for models whose whole context is within that budget.
"""

from dataclasses import replace

from kvq_runtime.family import Claim, Family
from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis
from kvq_runtime.stages.rtn import Rtn

FAMILY = Family(
    look=("wine", "d"),
    papers={"SVDq": "Hong et al., 2025, arXiv 2502.15304", "ShadowKV": "Sun et al., 2024, arXiv 2410.21465"},
    golden=("svdq-2bit-v4", "svdq-wf-2bit", "svdq-shadow-1.25bit-v4"),
    compared=("svdq-1.25bit-v4", "svdq-2bit-v4", "svdq-online-2bit-v4", "svdq-shadow-2bit-v4-128", "svdq-wf-1bit-v4",
              "svdq-wf-1.25bit-v4", "svdq-wf-2bit-v4"),
    claims=(
        Claim("SVDq: latent channels of mixed bits beat KIVI (2-bit keys, 4-bit values)", "svdq-2bit-v4", "kivi-2bit"),
        Claim("SVDq: a basis of the prompt beats KIVI too", "svdq-online-2bit-v4", "kivi-2bit"),
        Claim("here: water-filling beats SVDq's fixed schedule", "svdq-wf-2bit-v4", "svdq-2bit-v4"),
    ),
    opposed=True,
)  # fmt: skip

# mean bits → bits of the 8 equal runs of latent channels
SCHEDULES = {
    "3bit": (8, 4, 4, 4, 2, 2, 0, 0),
    "2.25bit": (8, 4, 4, 2, 0, 0, 0, 0),
    "2bit": (8, 4, 4, 0, 0, 0, 0, 0),
    "1.75bit": (8, 4, 2, 0, 0, 0, 0, 0),
    "1.25bit": (4, 4, 2, 0, 0, 0, 0, 0),
}
SHADOWED = ("2bit", "2bit-v4", "1.25bit", "1.25bit-v4")
PUBLISHED = ("2.25bit", "1.75bit", "1.25bit")  # with selection
FILLED = {"3bit": 3.0, "2bit": 2.0, "1.5bit": 1.5, "1.25bit": 1.25, "1bit": 1.0}


def scheme(quantize: Mixed) -> Scheme:
    """Keys: mean, basis, and these bits."""
    return Scheme(quantize, predict=Mean(), rotate=Basis())


def recipes() -> list[Recipe]:
    """The paper's schedules, water-filled ones, ranges by block, reading by chunks; values at 16 and at 4 bits."""
    exact, four = Scheme(Exact()), Scheme(Rtn(4, "all"))
    keys = {bits: (Mixed(schedule, codebook="uniform"), "its schedule") for bits, schedule in SCHEDULES.items()}
    keys |= {
        f"wf-{bits}": (Mixed(target=target, codebook="uniform"), "water-filled") for bits, target in FILLED.items()
    }
    keys["2bit-block"] = (Mixed(SCHEDULES["2bit"], codebook="block"), "ranges of each block")
    found = []
    for name, (quantize, how) in keys.items():
        for suffix, value, values in (("", exact, "16 bit"), ("-v4", four, "4 bits")):
            summary = f"SVDq, keys {name.removeprefix('wf-').removesuffix('-block')}, {how}; values {values}"
            found.append(Recipe(f"svdq-{name}{suffix}", scheme(quantize), value, "pre", summary=summary))
    for bits, schedule in SCHEDULES.items():
        keyed = scheme(Mixed(schedule, codebook="uniform"))
        for suffix, value, values in (("", exact, "16 bit"), ("-v4", four, "4 bits")):
            name, how = f"svdq-online-{bits}{suffix}", "its schedule, fitted to each prompt"
            summary = f"SVDq, keys {bits}, {how}; values {values}"
            found.append(Recipe(name, keyed, value, "pre", summary=summary, policies=(PromptFit(),)))
    shadowed = [_shadow(recipe) for recipe in found if recipe.name.removeprefix("svdq-") in SHADOWED]
    few = ShadowChunks(budget=128, outliers=4)
    short = [
        replace(one, name=f"{one.name}-128", policies=(few,), summary=f"{one.summary}, 128 tokens")
        for one in shadowed
        if one.name == "svdq-shadow-2bit-v4"
    ]
    published = {f"{start}{bits}{v}" for start in ("", "online-") for bits in PUBLISHED for v in ("", "-v4")}
    later = [one for one in found if one.name.removeprefix("svdq-") in published - {*SHADOWED}]
    return found + shadowed + short + [_shadow(recipe) for recipe in later]


def _shadow(recipe: Recipe) -> Recipe:
    name = recipe.name.replace("svdq", "svdq-shadow")
    policies = (ShadowChunks(), *recipe.policies)
    return replace(recipe, name=name, policies=policies, summary=f"{recipe.summary}; read by chunks")
