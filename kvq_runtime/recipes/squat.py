"""SQuat: KIVI's rounding with error feedback: later channels move the error out of the subspace of the queries.

    squat-*        keys after RoPE, per channel in groups of 32 tokens; values per token, in groups of 32 channels
    squat-pre-*    the same, keys before RoPE
    *-online-*     the subspace from each row's own prompt, as the paper has it; no calibration
    *-paper        the paper's r, λ and blocks

What it took for long prompts is a setting, `squat-2bit-paper+key.feedback.rank=40`: r = 40 for Llama-2 and DeepSeek-R1,
10 for Llama-3; before RoPE 60 for Llama-3, 40 for DeepSeek-R1, 20 for Mistral; λ = 5e-4, but 1e-3
for Llama-2 and for Mistral after RoPE (r = 5); 4 blocks for Llama-2 and Llama-3 before RoPE. Its short window is
`+window.recent=32+window.block=32`, as in `kivi-2bit-r32`.

Source: Wang et al., 2025 (SQuat), algorithm 1; settings of appendix D.2.
Differs: the subspace is calibrated, once, but for the online ones. A sequence of the calibration takes the place of the
prompt in the paper's λ, which grows with the prompt; ours (`squat-2bit`) does not, and counts every direction by its
weight instead of `rank` of them. The window is our KIVI's, at least 128 tokens, so that the two differ in the feedback
alone; the paper's accuracies are with 32. Keys before RoPE are given queries before RoPE; the variants with the paper's
settings have what the authors' code has, queries after RoPE. Blocks are a half of a head: 64 of the paper's 128.
"""

from dataclasses import replace
from typing import Literal

from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import kivi
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.feedback import QueryOrthogonal
from kvq_runtime.stages.rotate import Hadamard

FAMILY = Family(
    papers={"SQuat": "Wang et al., 2025, arXiv 2503.24358"},
    golden=("squat-2bit", "squat-hadamard-2bit",
            "squat-pre-2bit-paper+key.feedback.blocks=4+key.feedback.lam=5e-4+key.feedback.rank=60"
            "+name=squat-pre-2bit-llama3"),
    compared=("squat-2bit", "squat-2bit-paper", "squat-online-2bit", "squat-3bit", "squat-pre-2bit", "squat-pre-3bit",
              "squat-hadamard-2bit"),
)  # fmt: skip

Position = Literal["pre", "post"]
OURS: dict[Position, QueryOrthogonal] = {
    "post": QueryOrthogonal(),
    "pre": QueryOrthogonal(queries="before"),
}
PAPER = QueryOrthogonal(blocks=2, lam=1e-3, rank=5, normalize="paper")


def keys(feedback: QueryOrthogonal, bits: int = 2) -> Scheme:
    """KIVI's keys, with feedback."""
    return replace(kivi.keys(bits), feedback=feedback)


def recipes() -> list[Recipe]:
    """Ours at 2 to 4 bits, the paper's settings at its 2, each also by prompt, and keys per token after a Hadamard."""

    def of(name: str, position: Position, stage: QueryOrthogonal, summary: str, bits: int = 2, policies=()) -> Recipe:
        start, schemes = "squat" if position == "post" else "squat-pre", (keys(stage, bits), kivi.values(bits))
        text = f"SQuat {position}-RoPE, {bits} bits{summary}"
        return Recipe(f"{start}-{name}", *schemes, position, summary=text, window=kivi.WINDOW, policies=policies)

    found = []
    for position, ours in OURS.items():
        found += [of(f"{bits}bit", position, ours, "", bits) for bits in (2, 3, 4)]
        found.append(of("2bit-paper", position, PAPER, ", as published (paper)"))
        for name, stage in (("online-2bit", ours), ("online-2bit-paper", PAPER)):
            found.append(of(name, position, stage, ", the subspace from each prompt", policies=(PromptFit(),)))
    plain = Scheme(Grid(2, 16, 16), rotate=Hadamard("head"))
    summary = "a Hadamard per head, SQuat's feedback, HIGGS in groups of 16, 2 bits"
    return [*found, Recipe("squat-hadamard-2bit", replace(plain, feedback=OURS["post"]), plain, summary=summary)]
