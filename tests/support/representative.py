"""The recipes by which `make test` judges all: the first of every class, golden ones before others.

`make test-all` takes every recipe.
"""

from collections.abc import Iterable
from typing import Any

from kvq_runtime.recipe import Recipe, Scheme, facts, presets


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


def first_of_each(recipes: Iterable[Recipe]) -> frozenset[str]:
    """The names of the recipes that combine something which none before them does."""
    seen: set[tuple] = set()
    chosen = []
    for recipe in recipes:
        if not classes(recipe) <= seen:
            chosen.append(recipe.name)
            seen |= classes(recipe)
    return frozenset(chosen)


_golden = [presets()[name] for one in facts().values() for name in one.golden]
REPRESENTATIVE = first_of_each([presets()["exact"], *_golden, *presets().values()])
