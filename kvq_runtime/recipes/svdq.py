"""SVDq: PCA of all heads' keys before RoPE; each latent channel is rounded with bits by its variance.

    mean μ → z = (k - μ) B → bits by latent channel, in the order of the eigenvalues, down to none

The paper's schedules give 8 equal runs of channels their bits; its others are settings: 1.75 bits are
`svdq-2bit+key.quantize.bits=8,4,2,0,0,0,0,0`, those of 1.25 bits `4,4,2,0,0,0,0,0`. `svdq-wf-2bit-v4` finds them
for any total (`+key.quantize.target=1.5`) by reverse water-filling on the eigenvalues: bit by bit, each where it lowers
the error most. Values stay at 16 bits
(`+value.quantize=exact`), or take 4 bits per token (`-v4`). `svdq-online-*` decompose each row's own prompt
(`+policies.first_tokens=on`), with the paper's schedules.

Source: Hong et al., 2025 (SVDq, arXiv 2502.15304), algorithm 1, equations 4 and 6, table 1.
Differs: mean, basis and ranges come from calibration, once, and cost nothing per prompt; the paper decomposes each
prompt and counts the bits of neither basis nor ranges. Online ones do as the paper does and count both, for every row:
2 R bytes a channel, as much as R tokens of 16-bit keys. Decode-time tokens are encoded too; the paper keeps them in 16
bit. Ranges leave the exact sinks out and are clipped where that lowers the error; the paper's, of all tokens, are
stretched by one outlier.

`svdq-head-3bit` is the basis in a form that is read without decoding: of each head, keys by segment, values alike, with
the codes and gains of `fisher.py`'s, without its gradients. Of the paper it keeps the basis.

`svdq-shadow-*` reads by chunks, as ShadowKV does (Sun et al., 2024, arXiv 2410.21465; `+policies.chunks=on`): the
paper's "SVDq+Sparsity" (tables 3 and 5: 2.25, 1.75 and 1.25 bits), a budget of 2048 tokens; `svdq-shadow-online-*` with
the basis of each prompt, as published. All tokens are held; landmarks add 2 bits per key element of a 16-bit model,
which the paper does not count. Chunks alone are `exact+policies.chunks=on`; ShadowKV's own keys, of rank 160 in 16
bits, have no recipe: latent channels take 8 at most. `+policies.chunks.budget=128+policies.chunks.outliers=4` is for
models whose whole context is within that budget.
"""

from functools import partial

from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis
from kvq_runtime.stages.rtn import Rtn

# mean bits → bits of the 8 equal runs of latent channels
SCHEDULES = {
    "2.25bit": (8, 4, 4, 2, 0, 0, 0, 0),
    "2bit": (8, 4, 4, 0, 0, 0, 0, 0),
}
EXACT, FOUR = Scheme(Exact()), Scheme(Rtn(4, "all"))


def scheme(quantize: Mixed) -> Scheme:
    """Keys: mean, basis, and these bits."""
    return Scheme(quantize, predict=Mean(), rotate=Basis())


def scheduled(name: str, bits: str, value: Scheme, policies=(), how: str = "its schedule") -> Recipe:
    """Return the paper's schedule of these bits."""
    summary = f"SVDq, keys {bits}, {how}; values {'16 bit' if value == EXACT else '4 bits'}"
    key = scheme(Mixed(SCHEDULES[bits], codebook="uniform"))
    return Recipe(name, key, value, "pre", summary=summary, policies=policies)


def filled(name: str, bits: float) -> Recipe:
    """Bits by reverse water-filling; values at 4 bits."""
    key = scheme(Mixed(target=bits, codebook="uniform"))
    return Recipe(name, key, FOUR, "pre", summary=f"SVDq, keys {bits:g}bit, water-filled; values 4 bits")


def by_head(name: str, bits: float) -> Recipe:
    """Bases of each head for keys by segment and for values, each with `bits` bits, gains included."""
    rounding = Mixed(target=bits, codebook="stepped", gain=3, gains="head", slab=16)
    side = Scheme(rounding, predict=Mean(), rotate=Basis("head"))
    summary = f"SVDq's basis for each head, keys by segment, keys and values {bits:g} bits"
    return Recipe(name, side, side, "segment", summary=summary)


ONLINE, CHUNKS = "its schedule, fitted to each prompt", "its schedule, read by chunks"
BOTH = "its schedule, fitted to each prompt, read by chunks"
FAMILY = Family(
    presets={
        "svdq-2bit": partial(scheduled, bits="2bit", value=EXACT),
        "svdq-2bit-v4": partial(scheduled, bits="2bit", value=FOUR),
        "svdq-wf-2bit-v4": partial(filled, bits=2.0),
        "svdq-head-3bit": partial(by_head, bits=3.0),
        "svdq-online-2bit": partial(scheduled, bits="2bit", value=EXACT, policies=(PromptFit(),), how=ONLINE),
        "svdq-shadow-2bit-v4": partial(scheduled, bits="2bit", value=FOUR, policies=(ShadowChunks(),), how=CHUNKS),
        "svdq-shadow-online-2.25bit": partial(
            scheduled, bits="2.25bit", value=EXACT, policies=(ShadowChunks(), PromptFit()), how=BOTH
        ),
    },
    compared=("svdq-2bit-v4", "svdq-online-2bit", "svdq-wf-2bit-v4"),
)
