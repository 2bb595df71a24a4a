"""SQuat: KIVI's rounding with error feedback: later channels move the error out of the subspace of the queries.

    squat-*        keys after RoPE, per channel in groups of 32 tokens; values per token, in groups of 32 channels
    squat-pre-*    the same, keys before RoPE
    *-online-*     the subspace from each row's own prompt, as the paper has it; no calibration
    *-paper        the paper's r, λ and blocks

What it took for long prompts is a setting, `squat-2bit-paper+key.feedback.rank=40`: r = 40 for Llama-2 and DeepSeek-R1,
10 for Llama-3; before RoPE 60 for Llama-3, 40 for DeepSeek-R1, 20 for Mistral; λ = 5e-4, but 1e-3
for Llama-2 and for Mistral after RoPE (r = 5); 4 blocks for Llama-2 and Llama-3 before RoPE. Its short window is
`+window.recent=32+window.block=32`.

Source: Wang et al., 2025 (SQuat, arXiv 2503.24358), algorithm 1; settings of appendix D.2.
Differs: the subspace is calibrated, once, but for the online ones. A sequence of the calibration takes the place of the
prompt in the paper's λ, which grows with the prompt; ours (`squat-2bit`) does not, and counts every direction by its
weight instead of `rank` of them. The window is our KIVI's, at least 128 tokens, so that the two differ in the feedback
alone; the paper's accuracies are with 32. Keys before RoPE are given queries before RoPE; the variants with the paper's
settings have what the authors' code has, queries after RoPE. Blocks are a half of a head: 64 of the paper's 128.
"""

from dataclasses import replace
from functools import partial

from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Family, Position, Recipe
from kvq_runtime.recipes import kivi
from kvq_runtime.stages.feedback import QueryOrthogonal

PAPER = QueryOrthogonal(blocks=2, lam=1e-3, rank=5, normalize="paper")


def squat(name: str, position: Position, feedback: QueryOrthogonal, how: str = "", policies=()) -> Recipe:
    """2 bits; the subspace calibrated, or of each prompt."""
    how += ", the subspace from each prompt" if policies else ""
    summary = f"SQuat {position}-RoPE, 2 bits{how}"
    schemes = replace(kivi.keys(2), feedback=feedback), kivi.values(2)
    return Recipe(name, *schemes, position, summary=summary, window=kivi.WINDOW, policies=policies)


POST, PRE, ONLINE = QueryOrthogonal(), QueryOrthogonal(queries="before"), (PromptFit(),)
PUBLISHED = ", as published (paper)"
FAMILY = Family(
    presets={
        "squat-2bit": partial(squat, position="post", feedback=POST),
        "squat-2bit-paper": partial(squat, position="post", feedback=PAPER, how=PUBLISHED),
        "squat-online-2bit": partial(squat, position="post", feedback=POST, policies=ONLINE),
        "squat-online-2bit-paper": partial(squat, position="post", feedback=PAPER, how=PUBLISHED, policies=ONLINE),
        "squat-pre-2bit": partial(squat, position="pre", feedback=PRE),
        "squat-pre-2bit-paper": partial(squat, position="pre", feedback=PAPER, how=PUBLISHED),
        "squat-pre-online-2bit": partial(squat, position="pre", feedback=PRE, policies=ONLINE),
    },
    compared=("squat-2bit", "squat-2bit-paper", "squat-online-2bit", "squat-pre-2bit"),
)
