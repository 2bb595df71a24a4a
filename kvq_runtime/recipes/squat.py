"""SQuat: KIVI's rounding with error feedback: later channels move the error out of the subspace of the queries.

    squat-*        keys after RoPE, per channel in groups of 32 tokens; values per token, in groups of 32 channels
    squat-pre-*    the same, keys before RoPE
    *-online-*     the subspace from each row's own prompt, as the paper has it; no calibration
    *-paper        the paper's r, λ and blocks; *-llama2, *-llama3, *-mistral, *-r1: what it took for long prompts, by
                   model; -r32: with its short window, too, as `kivi-2bit-r32`

Source: Wang et al., 2025 (SQuat), algorithm 1; settings of appendix D.2.
Differs: the subspace is calibrated, once, but for the online ones. A sequence of the calibration takes the place of the
prompt in the paper's λ, which grows with the prompt; ours (`squat-2bit`) does not, and counts every direction by its
weight instead of `rank` of them. The window is our KIVI's, at least 128 tokens, so that the two differ in the feedback
alone; the paper gives both at most 32 (`-r32`: 32 to 63). Keys before RoPE are given queries before RoPE; the variants
with the paper's settings have what the authors' code has, queries after RoPE. Blocks are a half or a quarter of a head:
64 or 32 of the paper's 128 channels. Any other r, λ or g is a setting, `squat-2bit-paper+key.feedback.rank=60`.
"""

from dataclasses import replace
from typing import Literal

from kvq_runtime.family import Claim, Family
from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.recipes import kivi
from kvq_runtime.stages.feedback import QueryOrthogonal
from kvq_runtime.stages.grid import Grid
from kvq_runtime.stages.rotate import Hadamard

FAMILY = Family(
    look=("green", ">"),
    papers={"SQuat": "Wang et al., 2025, arXiv 2503.24358"},
    golden=("squat-2bit", "squat-pre-2bit-llama3", "squat-hadamard-2bit"),
    compared=("squat-2bit", "squat-2bit-paper", "squat-online-2bit", "squat-3bit", "squat-pre-2bit", "squat-pre-3bit",
              "squat-hadamard-2bit"),
    claims=(
        Claim("SQuat: feedback beats KIVI's plain rounding, keys after RoPE", "squat-2bit", "kivi-2bit"),
        Claim("SQuat: and so with the subspace of the prompt", "squat-online-2bit", "kivi-2bit"),
        Claim("SQuat: keys before RoPE are better still", "squat-pre-2bit", "squat-2bit"),
    ),
    combined=("squat-hadamard",),
    opposed=True,
)  # fmt: skip

Position = Literal["pre", "post"]
OURS: dict[Position, QueryOrthogonal] = {
    "post": QueryOrthogonal(),
    "pre": QueryOrthogonal(queries="before"),
}
# name → position → rank, λ, blocks
PAPER: dict[str, dict[Position, tuple[int, float, int]]] = {
    "paper": {"post": (5, 1e-3, 2), "pre": (5, 1e-3, 2)},
    "llama2": {"post": (40, 1e-3, 2), "pre": (5, 1e-3, 4)},
    "llama3": {"post": (10, 5e-4, 2), "pre": (60, 5e-4, 4)},
    "mistral": {"pre": (20, 5e-4, 2)},  # after RoPE: the defaults
    "r1": {"post": (40, 5e-4, 2), "pre": (40, 5e-4, 2)},
}


def keys(feedback: QueryOrthogonal, bits: int = 2) -> Scheme:
    """KIVI's keys, with feedback."""
    return replace(kivi.keys(bits), feedback=feedback)


def recipes() -> list[Recipe]:
    """Ours at 2 to 4 bits, the paper's settings by model at its 2, and keys per token after a Hadamard."""
    found = []
    for position, ours in OURS.items():
        start = "squat-2bit" if position == "post" else "squat-pre-2bit"
        for bits in (2, 3, 4):
            schemes, summary = (keys(ours, bits), kivi.values(bits)), f"SQuat {position}-RoPE, {bits} bits"
            found.append(Recipe(start.replace("2", str(bits)), *schemes, position, summary=summary, window=kivi.WINDOW))
        for name, settings in PAPER.items():
            if position in settings:
                rank, lam, blocks = settings[position]
                paper = QueryOrthogonal(blocks, lam, rank, "paper")
                summary = f"SQuat {position}-RoPE, 2 bits, as published ({name})"
                schemes = keys(paper), kivi.values(2)
                found.append(Recipe(f"{start}-{name}", *schemes, position, summary=summary, window=kivi.WINDOW))
    for position, ours in OURS.items():
        start = "squat-online-2bit" if position == "post" else "squat-pre-online-2bit"
        rank, lam, blocks = PAPER["paper"][position]
        for name, stage in ((start, ours), (f"{start}-paper", QueryOrthogonal(blocks, lam, rank, "paper"))):
            summary = f"SQuat {position}-RoPE, 2 bits, the subspace from each prompt"
            schemes = keys(stage), kivi.values(2)
            fit = (PromptFit(),)
            found.append(Recipe(name, *schemes, position, summary=summary, window=kivi.WINDOW, policies=fit))
    papers = [recipe for recipe in found if recipe.name.endswith("-paper")]
    found += [
        replace(one, name=f"{one.name}-r32", window=kivi.SHORT, summary=f"{one.summary}, a residual of 32")
        for one in papers
    ]
    plain = Scheme(Grid(2, 16, 16), rotate=Hadamard("head"))
    summary = "a Hadamard per head, SQuat's feedback, HIGGS in groups of 16, 2 bits"
    return [*found, Recipe("squat-hadamard-2bit", replace(plain, feedback=OURS["post"]), plain, summary=summary)]
