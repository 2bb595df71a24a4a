"""The recipes that `make test` leaves to `make test-all` combine nothing that one of the others does not."""

import pytest
from feeding import RECIPES
from representative import REPRESENTATIVE, classes, first_of_each

from kvq_runtime.recipe import presets


def missing(names: frozenset[str]) -> list[str]:
    """Recipes with a class that none of these has."""
    known = {found for name in names for found in classes(presets()[name])}
    return [name for name, recipe in presets().items() if not classes(recipe) <= known]


def test_every_class_of_recipes_has_a_representative_and_none_without_need():
    assert not missing(REPRESENTATIVE) and len(REPRESENTATIVE) < len(presets()) / 3
    assert missing(REPRESENTATIVE - {"gear-2bit"}) == ["gear-2bit", "gear-4bit", "gear-2bit-r2-g32"]
    assert "squat-2bit" in missing(REPRESENTATIVE - {"squat-2bit"})


def test_a_recipe_that_combines_something_new_is_taken():
    names = ["rtn-4bit", "rtn-2bit", "kivi-2bit", "kivi-3bit", "aqua-2bit", "aqua-3bit", "aqua-2bit-post"]
    found = first_of_each(presets()[name] for name in names)
    assert found == {"rtn-4bit", "kivi-2bit", "aqua-2bit", "aqua-2bit-post"}


@pytest.mark.parametrize("recipe", [RECIPES["aqua-2bit"], RECIPES["aqua-3bit"]], ids=["aqua-2bit", "aqua-3bit"])
def test_the_others_are_marked(recipe, request):
    marked = request.node.get_closest_marker("all_recipes") is not None
    assert marked == (recipe.name not in REPRESENTATIVE)
