"""Latents of each layer alone, in bases in the metric of the model's gradients, that fold into query and output.

    r = k' - R μ → z = r B → codes of z / g, bits by water-filling        x̂ = R_τ (ẑ Dᵀ + R μ)

    k'  keys turned back by the position τ of the middle of their segment of 32 tokens: within a segment only fast
        channels turn, so keys stay as compressible as before RoPE, nearly, while a query is turned once a segment
    B   is in the metric of Fisher information, for keys and values alike; D its dual
    z   has codes of Lloyd–Max points of at most 4 bits, above them even steps, which a kernel computes; channels get
        bits by slabs, of 8 channels, or of 16 of each head, the side of a tensor core's tile
    g   are gains of 3 bits: two of a token, each of half of its latents, or one of each head

Of SmolLM2-135M's latents on other sequences slabs of 8 and two gains of 3 bits leave 0.87 (3 bits) and 0.90 times (2
bits) what slabs of 16 and four of 2 bits leave, in nats by the metric; points by channel instead of Lloyd–Max's 0.99
times (3 bits). Paths through a trellis leave 0.7 to 0.8 times (`+all.quantize.codebook=trellis`). No kernel reads them:
a state is 7 bits, of tokens that lie in other threads of a tile, and its table is too long for registers. Closed paths
of the eight codes of a container over 16 points, which a kernel could read, would leave 0.94 times (codes of 1 to 3
bits alone; 0.93, 0.82 and 0.84 times of Gaussian numbers), and make a slab of 2 bits as dear as one of 4; bits by head
instead of alike 0.86 times; a basis of all heads instead of by head 0.5 times.

The first 32 tokens are exact. Qwen2.5 has no token for the beginning of a text and attends to the first delimiters, of
a chat those of the system prompt, of hidden states 12 to 24 times as long as the median. In Qwen2.5-Coder-0.5B's
answers to HumanEval (8 windows of 320 tokens, full encode) 3 bits of one fit diverge by 0.0134 nats with 4 exact
tokens, by 0.0061, 0.0035, 0.0033, 0.0021 with 16, 24, 32, 64.

Nothing is predicted from layers below. Since q · R_τ ẑ Dᵀ = (Dᵀ R_-τ q) · ẑ, and a sum of values is a sum of latents
times Dᵀ, a step reads codes and multiplies once a segment. Bits of all layers, of keys and of values are filled in one
order by the cost of errors. `fisher-head-*` have a basis and gains of each head, which tensor parallel workers share
out. `fisher-pre-*` take keys before RoPE and paths, which lose least, and have to be decoded to be read.

Source: as of `aqua_fisher.py`, without its predictions. Differs: no paper has keys by segment.
"""

from functools import partial
from typing import Literal

from kvq_runtime.geometry import Window
from kvq_runtime.recipe import Family, Position, Recipe, Scheme
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import GradientBasis

GAIN, SLAB = 3, 16
WINDOW = Window(sinks=32)  # a system prompt's first delimiters
BITS = (2.0, 2.5, 3.0, 4.0)


def fisher(name: str, bits: float, group: Literal["all", "head"] = "all", position: Position = "segment") -> Recipe:
    """Return the recipe with `bits` bits per element, averaged over all layers, keys and values, gains included."""
    if position == "pre":
        rounding = Mixed(target=bits, codebook="trellis", gain=GAIN, shared=True)
    else:
        gains, slab = ("head", SLAB) if group == "head" else (2, SLAB // 2)
        rounding = Mixed(target=bits, codebook="stepped", gain=GAIN, gains=gains, slab=slab, shared=True)
    scheme = Scheme(rounding, predict=Mean(), rotate=GradientBasis(group))
    where = "keys before RoPE" if position == "pre" else "keys by segment"
    basis = "a basis of each head" if group == "head" else "one basis of all heads"
    codes = ", trellis paths" if position == "pre" else ""
    summary = f"{where}, {basis}, in the metric of gradients{codes}, {bits:g} bits"
    return Recipe(name, scheme, scheme, position, summary=summary, window=WINDOW)


FAMILY = Family(
    presets={f"fisher-{bits:g}bit": partial(fisher, bits=bits) for bits in BITS}
    | {f"fisher-head-{bits:g}bit": partial(fisher, bits=bits, group="head") for bits in BITS}
    | {f"fisher-pre-{bits:g}bit": partial(fisher, bits=bits, position="pre") for bits in BITS},
    compared=("fisher-2bit", "fisher-3bit", "fisher-4bit"),
)
