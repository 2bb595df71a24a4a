"""The recipes by which `make test` judges all: one at least of every class. `make test-all` takes every recipe."""

from typing import Any

from kvq_runtime.recipe import Recipe, Scheme

REPRESENTATIVE = frozenset([
    "exact", "exact-pre", "h2o", "h2o-higgs-2bit",
    "aqua-2bit", "aqua-2bit-post", "aqua-2bit-channel", "aqua-2bit-below-1-2", "aqua-2bit-no-key",
    "aqua-2bit-sinks-0", "aqua-2bit-sinks-64",
    "aqua-2bit-mlp", "aqua-2bit-rrr", "aqua-2bit-quanto", "aqua-2bit-quanto-post", "aqua-2bit-quarot",
    "aqua-h2o-2bit", "aqua-lloyd-1bit", "aqua-polar-3bit", "aqua-klt-1bit-output",
    "aqua-metric-1bit", "aqua-metric-1bit-vocab", "aqua-metric-1bit-gptq",
    "aqua-metric-1bit-vocab-4bit", "aqua-fisher-1bit",
    "higgs-2bit", "lloyd-1bit", "lloyd-even-2bit", "mean-lloyd-1bit-post", "mean-lloyd-even-2bit-post",
    "quarot-2bit", "turboquant-3bit",
    "kivi-2bit", "kivi-2bit-outliers", "gear-2bit", "gear-l-2bit", "kvquant-3bit",
    "polar-radius8", "polar-hadamard", "polar-3bit-fitted", "polar-3bit-fitted-plain", "polar-online",
    "polar-online-plain",
    "trellis-head-1bit", "aqua-trellis-2bit", "aqua-absorbed-2bit-3",
    "squat-2bit", "squat-pre-2bit", "squat-hadamard-2bit", "squat-online-2bit", "squat-pre-online-2bit",
    "subkv-2bit", "subkv-aqua-2bit",
    "zipcache-2bit", "zipcache-tokens-2bit", "zipcache-online-2bit", "aqua-zipcache-2bit",
    "oscar-2bit", "oscar-3bit", "wush-2bit", "wush-higgs-2bit",
    "svdq-3bit-v4", "svdq-online-3bit", "svdq-shadow-2bit", "svdq-shadow-2bit-v4",
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
