"""SubKV: KIVI's rounding in blocks of 32, the first token exact, and a recent window that grows with attention.

Keys are rounded per channel in groups of tokens, values per token in groups of channels. The window holds 32 tokens;
while its oldest token gets no less attention than the newest one, the next block stays exact. No calibration.

    subkv-2bit        "2 bits" are 2 and two 16-bit numbers per group of 32: 3
    -by-layer         each layer has a window of its own; of any other, `+policies.dynamic.per=layer`
    subkv-aqua-2bit   AQUA-KV's prediction and grids under SubKV's first token and window

Recipes with this window need attention weights: call model.set_attn_implementation("kvq").

Source: Zeng et al., 2025 (SubKV), section 3 and algorithm 1; groups of 32, N = 32 and F = 1 as in its section 4.1.
Differs: where text and pseudocode contradict each other or leave a gap, as follows.
- The text extends the window if A_new ≤ A_edge; line 22 if A_edge > A_n[1], presumably the newest token. The
  text's rule; the edge is the oldest exact token after the first F.
- The text encodes one edge token a step, line 25 the whole window. Neither can be: a group of one token has no range,
  and an empty window is none. Whole blocks of G, the oldest first, leaving at least N tokens.
- The window grows by the token that came, and is decided again at every step, as in lines 21 to 23; but there without
  bound or end, here by at most 3 blocks (N_max = 128, KIVI's residual), and back to N when attention drops.
- Heads, layers and rows are not mentioned. One decision for all, from means over query heads, layers and rows, so that
  blocks stay the same everywhere; it is taken before a forward pass, from the weights of the one before, because its
  first layer encodes before its last has attended. `-by-layer` is the plainer reading, algorithm 1 inside one attention
  layer: means over query heads and rows, of the same forward pass.
- Values have d/G groups a token (line 8 has d/N), and wait for the keys, as the text says.
- Sinks stay in their block, masked, and are put back when it is read, so groups of 32 begin at token 0, not at F.
"""

from dataclasses import replace

from kvq_runtime.policies.dynamic_window import DynamicWindow
from kvq_runtime.recipe import Claim, Family, Recipe, Window
from kvq_runtime.recipes import aqua, higgs, kivi

FAMILY = Family(
    look=("olive", "^"),
    papers={"SubKV": "Zeng et al., 2025, doi 10.1002/spe.3422"},
    golden=("subkv-aqua-2bit", "subkv-2bit"),
    compared=("subkv-2bit", "subkv-3bit", "subkv-aqua-2bit"),
    claims=(
        Claim(
            "SubKV: a window that attention keeps beats KIVI's, in its blocks", "subkv-2bit", "kivi-2bit-r32", "in-use"
        ),
    ),
    combined=("subkv-aqua",),
    opposed=True,
)

WINDOW = Window(sinks=1, recent=32, block=32)  # the paper's F, N and G


def subkv(bits: int) -> Recipe:
    """The paper's method at `bits` bits."""
    summary = f"SubKV, {bits} bits, groups of 32, N from 32 to 128"
    schemes, policies = (kivi.keys(bits), kivi.values(bits)), (DynamicWindow(),)
    return Recipe(f"subkv-{bits}bit", *schemes, summary=summary, window=WINDOW, policies=policies)


def recipes() -> list[Recipe]:
    """2, 3 and 4 bits, 2 by layer, and AQUA-KV in SubKV's window."""
    two, three, four = (subkv(bits) for bits in (2, 3, 4))
    predicted = aqua.aqua(
        "2bit", higgs.scheme("2bit"), higgs.scheme("4bit"), "AQUA-KV over HIGGS, 2bit, in SubKV's window"
    )
    mixed = replace(predicted, name="subkv-aqua-2bit", window=WINDOW, policies=two.policies)
    policies, summary = (DynamicWindow(per="layer"),), f"{two.summary}, by layer"
    return [two, three, four, mixed, replace(two, name="subkv-2bit-by-layer", summary=summary, policies=policies)]
