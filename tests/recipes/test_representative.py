"""The recipes that `make test` leaves to `make test-all` combine nothing that one of the others does not."""

from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
from feeding import RECIPES
from written import EVERY, REPRESENTATIVE, classes, first_of_each

from kvq_runtime.policy_setting import policy_kinds
from kvq_runtime.stages.kinds import kinds
from kvq_runtime.stages.stage import setting_types


def missing(names: frozenset[str]) -> list[str]:
    """Recipes with a class that none of these has."""
    known = {found for name in names for found in classes(EVERY[name])}
    return [name for name, recipe in EVERY.items() if not classes(recipe) <= known]


def test_every_class_of_recipes_has_a_representative_and_few_have_two():
    assert not missing(REPRESENTATIVE) and len(REPRESENTATIVE) < len(EVERY) / 2
    assert missing(REPRESENTATIVE - {"gear-2bit"}) == ["gear-2bit", "gear-4bit"]
    assert "squat-2bit" in missing(REPRESENTATIVE - {"squat-2bit"})


def test_a_recipe_that_combines_something_new_is_taken():
    post = "aqua-2bit+position=post"
    found = first_of_each(["rtn-4bit", "rtn-2bit", "kivi-2bit", "kivi-3bit", "aqua-2bit", "aqua-3bit", post])
    assert found == {"rtn-4bit", "kivi-2bit", "aqua-2bit", post}


OPTIONS = {  # that none of these recipes has: tests of their stages do, and test_any_recipe.py draws from all
    ("mixed", "weighed"),
    *((kind, name) for kind in ("low_rank", "mlp") for name in ("keys", "storage", "fit", "both")),
    *{("query_basis", "queries"), ("gradient_basis", "storage"), ("query_orthogonal", "queries")},
    *{("rtn_clipped", "range"), ("even", "range"), ("separable", "range"), ("polar_fitted", "radius")},
    ("low_rank_sparse", "group"),
}


def test_every_stage_and_every_option_of_one_is_some_recipes():
    """So is every policy; add to tests/support/written.py what no preset has."""
    stages = (stage for recipe in EVERY.values() for scheme in recipe.schemes for _, stage in scheme.stages)
    used = [*stages, *(policy for recipe in EVERY.values() for policy in recipe.policies)]
    taken = {(type(part), one.name, getattr(part, one.name)) for part in used for one in fields(part)}
    classes = [cls for known in (kinds() | policy_kinds()).values() for cls in known.values()]
    assert {type(part) for part in used} == {*classes}
    for cls in classes:
        for name, expected in setting_types(cls).items():
            few = (True, False) if expected is bool else get_args(expected) if get_origin(expected) is Literal else ()
            left = [option for option in few if (cls, name, option) not in taken]
            assert bool(left) == ((cls.kind, name) in OPTIONS), (cls.kind, name, left)


@pytest.mark.parametrize("recipe", [RECIPES["aqua-2bit"], RECIPES["aqua-3bit"]], ids=["aqua-2bit", "aqua-3bit"])
def test_the_others_are_marked(recipe, request):
    marked = request.node.get_closest_marker("all_recipes") is not None
    assert marked == (recipe.name not in REPRESENTATIVE)
