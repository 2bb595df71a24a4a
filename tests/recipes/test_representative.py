"""The recipes that `make test` leaves to `make test-all` combine nothing that one of the others does not."""

import pytest
from feeding import RECIPES
from representative import REPRESENTATIVE, classes

from kvq_runtime.recipe import presets


def missing(names: frozenset[str]) -> list[str]:
    """Recipes with a class that none of these has."""
    known = {found for name in names for found in classes(presets()[name])}
    return [name for name, recipe in presets().items() if not classes(recipe) <= known]


def test_every_class_of_recipes_has_a_representative():
    assert presets().keys() >= REPRESENTATIVE
    assert not missing(REPRESENTATIVE), "add one of these to tests/support/representative.py"


def test_a_class_without_one_is_seen():
    assert missing(REPRESENTATIVE - {"gear-2bit"}) == ["gear-2bit", "gear-4bit", "gear-2bit-r2-g32"]
    assert "squat-2bit" in missing(REPRESENTATIVE - {"squat-2bit"})


@pytest.mark.parametrize("recipe", [RECIPES["aqua-2bit"], RECIPES["aqua-3bit"]], ids=["aqua-2bit", "aqua-3bit"])
def test_the_others_are_marked(recipe, request):
    marked = request.node.get_closest_marker("all_recipes") is not None
    assert marked == (recipe.name not in REPRESENTATIVE)
