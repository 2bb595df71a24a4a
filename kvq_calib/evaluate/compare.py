"""Choose the recipes that `kvq compare` compares on one model."""

from collections.abc import Sequence

from kvq_runtime.artifact import recipe_text
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, facts, families, presets


def chosen() -> list[str]:
    """The names of the recipes that each family compares: those of its `FAMILY`, or its first."""
    known = families()
    own = {file: [known[file][0].name] if one.compared is None else one.compared for file, one in facts().items()}
    return [name for names in own.values() for name in names]


def choose(asked: Sequence[str], geometry: Geometry) -> tuple[list[Recipe], list[str]]:
    """The recipes to compare, and why others are not among them.

    asked   texts as `recipe_text.read` takes them, each of which must suit the model; ["all"]; or nothing for `chosen`
    """
    known = presets()
    if asked and list(asked) != ["all"]:
        return recipe_text.distinct(recipe_text.read(text).check(geometry) for text in asked), []
    names = list(known) if asked else chosen()
    found, notes = [], []
    for name in names:
        try:
            found.append(known[name].check(geometry))
        except ValueError as error:
            notes.append(f"{name} is left out: {error}")
    return found, notes
