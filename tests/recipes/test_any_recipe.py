"""Whatever settings are put together: `Recipe.check` says in a sentence why not, or the recipe encodes and decodes.

Half of the recipes are a preset whose stages have one other setting each: allowed, at an end of what is, or just
beyond. The rest are put together from stages of all kinds; most are refused.
"""

import random
import re
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import feeding
import fitted
import pytest

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.recipe import Recipe, families, presets
from kvq_runtime.stages.kinds import kinds
from kvq_runtime.stages.stage import SLOTS, Scheme, Stage

GEOMETRIES = [Geometry(2, 2, 32), Geometry(3, 1, 64), Geometry(2, 3, 16), Geometry(2, 2, 24), Geometry(1, 1, 8)]
SETTINGS: dict[str, list[Any]] = {  # by name; a Literal and a bool are drawn from what they may be
    "bits": [1, 2, 3, 4, 5, 6, 7, 8, 0, 9],
    "group": ["head", "all", 8, 16, 32, 64, 2, 1, 12, 0],
    "dim": [1, 2, 4, 8, 3],
    "size": [16, 256, 64, 8, 2, 0, 1000],
    "seed": [0, 1, 7],
    "rank": [1, 4, 64, 0, 1000],
    "keep": [0.96, 0.5, 1.0, 0.0],
    "target": [0.0, 2.0, 3.3, 0.1],
    "gain": [0, 4, 8, 1],
    "gains": [1, "head", 2, 0],
    "slab": [1, 8, 16, 7, 0],
    "covered": [0.99, 1.0, 0.5, 0.1],
    "levels": [4, 1, 2, 6, 0],
    "lam": [1.0, 0.0, 100.0, -1.0],
    "blocks": [2, 4, 8, 3, 1],
    "share": [0.01, 0.1, 0.5, 1.0, 0.0],
    "ridge": [1e-3, 0.0, 1.0],
    "below": [(1,), (1, 2), (2,), (), (1, 1)],
    "counts": [(), (16, 16, 32), (64,), (8, 8)],
}
BITS_OF_SEVERAL = [(4, 2), (4, 2, 0), (8, 4, 2, 1, 0), (3,), (3, 3, 2), (4, 2, 2, 2), (0,), (2, 4), ()]


def setting(draw: random.Random, name: str, kind: Any) -> Any:
    """A value for a setting of this name and type."""
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    if kind is bool:
        return draw.random() < 0.5
    values = BITS_OF_SEVERAL if name == "bits" and get_origin(kind) is tuple else SETTINGS[name]
    return values[int(len(values) * draw.random() ** 1.5)]  # the first ones, which are allowed, more often


def stage(draw: random.Random, slot: str) -> Stage:
    """A stage of this slot; ValueError where its settings are refused when it is made."""
    cls: Any = draw.choice(list(kinds()[slot].values()))
    types = get_type_hints(cls)
    return cls(**{one.name: setting(draw, one.name, types[one.name]) for one in fields(cls) if draw.random() < 0.4})


def scheme(draw: random.Random) -> Scheme:
    chance = {"quantize": 1.0, "predict": 0.3, "rotate": 0.4, "feedback": 0.15, "correct": 0.2}
    drawn: dict[str, Any] = {}
    for slot in SLOTS:
        wanted = draw.random() < chance[slot]
        while wanted and slot not in drawn:
            made = checked(stage, draw, slot)
            drawn |= {slot: made} if made else {}
    return Scheme(**drawn, axis=draw.choice(("token", "token", "channel")))


def varied(draw: random.Random, given: Scheme) -> Scheme:
    """A preset's scheme, half of its stages with another setting."""

    def changed(one: Stage) -> Stage:
        types = get_type_hints(type(one))
        names = [each.name for each in fields(one)]
        return replace(one, **{name: setting(draw, name, types[name]) for name in names and [draw.choice(names)]})

    made = {slot: checked(changed, one) for slot, one in given.stages if draw.random() < 0.5}
    return replace(given, **{slot: one for slot, one in made.items() if one is not None})


def drawn_recipe(draw: random.Random, known: list[list[Recipe]]) -> Recipe:
    """A preset with other settings, or any stages together."""
    window = Window(draw.choice((0, 4)), draw.choice((0, 3)), draw.choice((16, 32, 64, 5)))
    if draw.random() < 0.5:
        given = draw.choice(draw.choice(known))
        key, value = varied(draw, given.key), varied(draw, given.value)
        return Recipe("drawn", key, value, given.position, given.layers, "", window)
    return Recipe("drawn", scheme(draw), scheme(draw), draw.choice(("pre", "post", "segment")), {}, "", window)


def checked(make, *given: Any) -> Any:
    """What is made, or None where it was refused; the refusal is a sentence that says what was given."""
    try:
        return make(*given)
    except ValueError as error:
        told = str(error)
        assert 10 < len(told) < 600 and " " in told and not re.search(r"=None\b|object has no|keyword argument", told)
        return None


def encodes_and_decodes(drawn: Recipe, geometry: Geometry) -> None:
    """Feed a cache two blocks and a few tokens more, and read everything back."""
    window = drawn.window
    x = feeding.tensors(window.sinks + window.recent + 2 * window.block + 3, 2, geometry)
    cache = BlockCache(drawn, geometry, fitted.tensors(drawn, geometry))
    feeding.feed_in(cache, x, [x.shape[3] - 2, 2])
    for layer, (store, pair) in enumerate(zip(cache.layers.values(), feeding.read(cache), strict=True)):
        assert store.encoded >= 2 * window.block
        for number, found in enumerate(pair):
            codec, exact = cache.codecs[layer][number], x[layer, number]
            assert found.shape == exact.shape and found.isfinite().all(), f"layer {layer} {codec.scheme}"
            assert feeding.error(found.float(), exact) < 50, f"layer {layer} {codec.scheme}"


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_a_recipe_is_refused_with_a_sentence_or_encodes_and_decodes(count):
    draw, encoded, changed = random.Random(count), 0, 0
    known, used = [family.recipes() for family in families().values()], set()
    for recipe in presets().values():
        used |= {one for scheme in recipe.schemes for _, one in scheme.stages}
    for number in range(count):
        drawn, geometry = drawn_recipe(draw, known), draw.choice(GEOMETRIES)
        if checked(drawn.check) is None:
            continue
        assert Recipe.from_json(drawn.to_json()) == drawn
        if checked(drawn.check, geometry) is None:
            continue
        try:
            encodes_and_decodes(drawn, geometry)
        except Exception as error:
            error.add_note(f"recipe {number} of {count}, {geometry}: {drawn.to_json()}")
            raise
        encoded += 1
        changed += any(one not in used for scheme in drawn.schemes for _, one in scheme.stages)
    assert encoded >= count / 8 and changed >= count / 16, (encoded, changed)
