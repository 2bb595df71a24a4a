"""What a preset's name stands for never changes: artifacts, plans and published figures are known by it."""

import json
from dataclasses import fields

from kvq_runtime.recipe import presets
from scripts import make_golden

DIGESTS = json.loads(make_golden.PRESETS.read_text())


def test_every_preset_is_what_it_was_and_a_new_one_is_written_down():
    """After a new preset: run scripts/make_golden.py. A line that would have to change means another name."""
    found = {name: make_golden.digest(recipe) for name, recipe in presets().items()}
    assert {name: DIGESTS.get(name) for name in found} == found
    assert DIGESTS.keys() == found.keys()


def test_a_setting_that_is_at_its_default_and_younger_than_the_format_is_not_named():
    checked = 0
    for recipe in presets().values():
        stated = recipe.to_json()
        parts = [(policy, stated.get(policy.slot, {})) for policy in recipe.policies]
        parts += [(stage, stated["key"][slot]) for slot, stage in recipe.key.stages]
        parts += [(stage, stated["value"][slot]) for slot, stage in recipe.value.stages]
        for part, settings in parts:
            for name in [field.name for field in fields(part) if field.kw_only]:
                assert (name in settings) == (getattr(part, name) != getattr(type(part), name)), (recipe.name, name)
                checked += 1
    assert checked
