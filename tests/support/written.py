"""Every recipe that tests take: presets, and presets with the settings that no preset has, as they are written.

`make test` judges all by REPRESENTATIVE: every one with settings, and the first of every other class, golden ones
before others. `make test-all` takes every recipe.
"""

from collections.abc import Iterable
from typing import Any

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.recipe import Recipe, Scheme, families, presets

SETTINGS = (  # options of stages, and stages together, that no preset has
    "aqua-2bit+position=post", "aqua-2bit+window.sinks=0", "aqua-2bit+window.sinks=64", "aqua-2bit+key.predict=none",
    "aqua-2bit+value.predict.keys=false",
    "aqua-2bit+key.axis=channel+value.axis=channel", "aqua-2bit+key.predict=low_rank+value.predict=low_rank",
    "aqua-2bit+all.predict.fit=clean+key.predict.below=2+value.predict.below=", "aqua-2bit-quanto+position=post",
    "aqua-2bit+key.predict=mlp+value.predict=mlp+key.predict.norm=none+value.predict.hidden=width"
    "+value.predict.tokens=all",
    "aqua-fisher-1bit+all.rotate.storage=gptq4",
    "svdq-wf-2bit-v4+key.rotate=query_basis+value.quantize=mixed+value.rotate=output_basis",
    "kivi-2bit+key.correct=sparse+key.correct.group=channel+value.correct=sparse",
    "mean-lloyd-3bit-post+all.quantize=even", "mean-lloyd-3bit-post+position=pre",
    "polar-paper+all.rotate=hadamard+all.rotate.group=head+all.quantize.points=mean+window.sinks=4",
    "polar-paper-fitted+all.quantize.levels=0+all.quantize.points=mean",
    "polar-paper-fitted+all.rotate=none", "polar-online+all.rotate=none",
    "squat-pre-2bit-paper+key.feedback.blocks=4", "svdq-2bit+key.quantize.codebook=block",
    "svdq-2bit+policies.chunks=on", "snapkv+policies.votes.pool=avg",
)  # fmt: skip
EVERY: dict[str, Recipe] = {text: read(text) for text in (*presets(), *SETTINGS)}


def kind(stage: Any) -> str | None:
    """The kind of a stage, None where there is none."""
    return None if stage is None else stage.kind


def stages(scheme: Scheme) -> tuple[str | None, ...]:
    """The kinds of a scheme's stages, and along what it rounds."""
    parts = (scheme.predict, scheme.rotate, scheme.quantize, scheme.feedback, scheme.correct)
    return *map(kind, parts), scheme.axis


def classes(recipe: Recipe) -> set[tuple]:
    """What a recipe combines, for each of its schemes: stages, position, policies, whether it has sinks. Widths and
    other sizes do not count."""
    policies = frozenset(map(kind, recipe.policies))
    return {(*stages(scheme), recipe.position, policies, recipe.window.sinks > 0) for scheme in recipe.schemes}


def first_of_each(names: Iterable[str]) -> frozenset[str]:
    """The names of the recipes that combine something which none before them does."""
    seen: set[tuple] = set()
    chosen = []
    for name in names:
        if not classes(EVERY[name]) <= seen:
            chosen.append(name)
            seen |= classes(EVERY[name])
    return frozenset(chosen)


_golden = [text for one in families().values() for text in one.golden if text in EVERY]
REPRESENTATIVE = first_of_each(["exact", *SETTINGS, *_golden, *EVERY]).union(SETTINGS)
