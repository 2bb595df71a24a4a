"""The recipes by which `make test` judges all: one at least of every class. `make test-all` takes every recipe."""

from typing import Any

from written import SETTINGS

from kvq_runtime.recipe import Recipe, Scheme

REPRESENTATIVE = frozenset([
    *SETTINGS,
    "exact", "exact-pre", "h2o", "h2o-higgs-2bit",
    "aqua-2bit", "aqua-2bit-quanto", "aqua-2bit-quarot",
    "aqua-h2o-2bit", "aqua-lloyd-2bit", "aqua-polar-3bit",
    "aqua-metric-1bit", "aqua-metric-1bit-vocab",
    "aqua-fisher-1bit",
    "higgs-2bit", "lloyd-1bit", "lloyd-even-2bit", "mean-lloyd-1bit-post",
    "quarot-2bit", "turboquant-3bit",
    "kivi-2bit", "gear-2bit", "gear-l-2bit", "kvquant-3bit",
    "polar-radius8", "polar-online", "polar-paper-fitted",
    "trellis-head-1bit", "aqua-trellis-2bit", "aqua-absorbed-2bit-2",
    "squat-2bit", "squat-pre-2bit", "squat-hadamard-2bit", "squat-online-2bit", "squat-pre-online-2bit",
    "subkv-2bit", "subkv-aqua-2bit",
    "zipcache-2bit", "zipcache-tokens-2bit", "zipcache-online-2bit", "aqua-zipcache-2bit",
    "oscar-2bit", "oscar-3bit", "wush-2bit", "wush-higgs-2bit",
    "svdq-3bit-v4", "svdq-online-2bit", "svdq-shadow-2bit-v4",
    "svdq-shadow-online-2.25bit", "svdq-shadow-online-2.25bit-v4",
])  # fmt: skip


def kind(stage: Any) -> str | None:
    """The kind of a stage, None where there is none."""
    return None if stage is None else stage.kind


def stages(scheme: Scheme) -> tuple[str | None, ...]:
    """The kinds of a scheme's stages, and along what it rounds."""
    parts = (scheme.predict, scheme.rotate, scheme.quantize, scheme.feedback, scheme.correct)
    return *map(kind, parts), scheme.axis


def classes(recipe: Recipe) -> set[tuple]:
    """What a recipe combines, for each of its schemes: stages, position, policies. Widths and sizes do not count."""
    policies = frozenset(map(kind, recipe.policies))
    return {(*stages(scheme), recipe.position, policies) for scheme in recipe.schemes}
