"""SnapKV: hold the tokens of a prompt that its last queries attend to, and all tokens after it.

    snapkv             1024 tokens of a prompt, in 16 bit, as the paper's smallest
    snapkv-256         256 tokens, for models whose whole context is about as long as the paper's budget
    snapkv-higgs-2bit  1024 tokens, stored by HIGGS
    aqua-snapkv-2bit   by AQUA-KV

Tokens are evicted before encoding, and fits do not depend on it. Bits are of generated tokens, which are all held.

Source: Li et al., 2024 (SnapKV, arXiv 2404.14469).
Differs: see `kvq_runtime/policies/prompt_votes.py`.
"""

from dataclasses import replace

from kvq_runtime.policies.prompt_votes import PromptVotes
from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import aqua, higgs
from kvq_runtime.stages.exact import Exact

FAMILY = Family(
    look=("sky", "*"),
    papers={"SnapKV": "Li et al., 2024, arXiv 2404.14469"},
    compared=("snapkv-256", "snapkv-higgs-2bit-256"),
    combined=("aqua-snapkv",),
)


def recipes() -> list[Recipe]:
    """16 bit, HIGGS and AQUA-KV at 2 bits, over 1024 and over 256 tokens of the prompt."""
    exact, two = Scheme(Exact()), higgs.scheme("2bit")
    over = [
        Recipe("snapkv", exact, exact, summary="16 bit"),
        Recipe("snapkv-higgs-2bit", two, two, summary="HIGGS, 2 bits"),
        aqua.aqua("snapkv-2bit", two, higgs.scheme("4bit"), "AQUA-KV, 2 bits"),
    ]
    return [
        replace(one, name=one.name + suffix, policies=(votes,),
                summary=f"{one.summary}, over the {votes.tokens} tokens of a prompt that SnapKV holds")
        for one in over
        for suffix, votes in (("", PromptVotes()), ("-256", PromptVotes(256)))
    ]  # fmt: skip
