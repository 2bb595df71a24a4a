"""Whatever settings are put together: `Recipe.check` says in a sentence why not, or the recipe encodes and decodes.

Every other recipe is a preset whose stages have one other setting each: allowed, at an end of what is allowed, or just
beyond. The rest are put together from stages of all kinds, half of them as some preset has them; most are refused.
KVQ_RECIPES is how many.
"""

import os
import random
import re
from collections import Counter, defaultdict
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import feeding
import fitted
import pytest
import torch
from written import EVERY

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.recipe import Recipe, family
from kvq_runtime.stages.kinds import kinds
from kvq_runtime.stages.stage import SLOTS, Scheme, Stage

COUNT = int(os.environ.get("KVQ_RECIPES", "600"))
SHARDS = 4
GEOMETRIES = [Geometry(2, 2, 32), Geometry(3, 1, 64), Geometry(2, 3, 16), Geometry(2, 2, 24), Geometry(1, 1, 8)]
BLOCKS = (16, 32, 64, 5)
SETTINGS: dict[str, list[Any]] = {  # by name; a Literal and a bool are drawn from what they may be
    "bits": [1, 2, 3, 4, 5, 6, 7, 8, 0, 9],
    "group": ["head", "all", 8, 16, 32, 64, 2, 1, 12, 0],
    "dim": [1, 2, 4, 8, 3],
    "channels": [4, 2, 8, 3, 0],
    "size": [16, 256, 64, 8, 2, 0, 4096, 1000],
    "seed": [0, 1, 7],
    "rank": [1, 4, 64, 0, 1000],
    "keep": [0.96, 0.5, 1.0, 0.0],
    "target": [0.0, 2.0, 3.3, 0.1],
    "step": [0.0, 0.5, 1e-3, -1.0],
    "gain": [0, 4, 8, 1],
    "covered": [0.99, 1.0, 0.5, 0.1],
    "levels": [4, 1, 2, 6, 0],
    "memory": [8, 10, 4, 1],
    "lam": [1.0, 0.0, 100.0, -1.0],
    "blocks": [2, 4, 8, 3, 1],
    "slots": [1, 4, 64, 0],
    "limit": [8.0, 0.0, 1e9],
    "share": [0.01, 0.1, 0.5, 1.0, 0.0],
    "ridge": [1e-3, 0.0, 1.0],
    "below": [(1,), (1, 2), (2,), (), (1, 1)],
    "counts": [(), (16, 16, 32), (64,), (8, 8)],
}
FAMILIES: defaultdict[str, list[Recipe]] = defaultdict(list)  # of presets, of each as often as of any other
for _name, _preset in EVERY.items():
    FAMILIES[family(_name)].append(_preset)
BITS_OF_SEVERAL = [(4, 2), (4, 2, 0), (8, 4, 2, 1, 0), (3,), (3, 3, 2), (4, 2, 2, 2), (0,), (2, 4), ()]


def setting(draw: random.Random, name: str, kind: Any) -> Any:
    """A value for a setting of this name and type."""
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    if kind is bool:
        return draw.random() < 0.5
    values = BITS_OF_SEVERAL if name == "bits" and get_origin(kind) is tuple else SETTINGS[name]
    return values[int(len(values) * draw.random() ** 1.5)]  # the first ones, which are allowed, more often


def stage(draw: random.Random, slot: str, known: list[Stage]) -> Stage:
    """A stage of this slot; ValueError where its settings are refused when it is made."""
    if known and draw.random() < 0.6:
        return draw.choice(known)
    cls: Any = draw.choice(list(kinds()[slot].values()))
    types = get_type_hints(cls)
    return cls(**{one.name: setting(draw, one.name, types[one.name]) for one in fields(cls) if draw.random() < 0.4})


def scheme(draw: random.Random, known: dict[str, list[Stage]]) -> Scheme:
    chance = {"quantize": 1.0, "predict": 0.4, "rotate": 0.5, "feedback": 0.25, "correct": 0.3}
    drawn: dict[str, Stage] = {}
    for slot in SLOTS:
        wanted = draw.random() < chance[slot]
        while wanted and slot not in drawn:
            made = checked(stage, draw, slot, known[slot])
            drawn |= {slot: made} if made else {}
    return Scheme(**drawn, axis=draw.choice(("token", "token", "channel")))


def changed(draw: random.Random, given: Stage) -> Stage:
    """The stage with one other setting; ValueError where that is refused."""
    types = get_type_hints(type(given))
    names = [one.name for one in fields(given)]
    return replace(given, **{name: setting(draw, name, types[name]) for name in names and [draw.choice(names)]})


def varied(draw: random.Random, given: Scheme) -> Scheme:
    """A preset's scheme, half of its stages with another setting."""
    made = {slot: checked(changed, draw, one) for slot, one in given.stages if draw.random() < 0.5}
    return replace(given, **{slot: one for slot, one in made.items() if one is not None})


def recipe(draw: random.Random, known: dict[str, list[Stage]]) -> Recipe:
    """A preset with other settings, or what is put together from any stages."""
    window = Window(draw.choice((0, 4)), draw.choice((0, 3)), draw.choice(BLOCKS))
    if draw.random() < 0.5:
        given = draw.choice(FAMILIES[draw.choice(list(FAMILIES))])
        key, value = varied(draw, given.key), varied(draw, given.value)
        return Recipe("drawn", key, value, given.position, given.layers, "", window)
    key, value = scheme(draw, known), scheme(draw, known)
    layers = {0: (scheme(draw, known), scheme(draw, known))} if draw.random() < 0.3 else {}
    return Recipe("drawn", key, value, draw.choice(("pre", "post")), layers, "", window)


@pytest.fixture(scope="module")
def known() -> dict[str, list[Stage]]:
    """Every stage that a preset has, by slot."""
    found: dict[str, dict[Stage, None]] = {slot: {} for slot in SLOTS}
    for preset in EVERY.values():
        for one in preset.schemes:
            for slot, used in one.stages:
                found[slot][used] = None
    return {slot: list(stages) for slot, stages in found.items()}


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
            if codec.packed_reader is not None:
                reads_packed(codec)
            for name, field in store.fields(number, *next(iter(store.runs()))).items():
                shape, dtype = codec.fields(torch.float32)[name]
                assert field.shape[-len(shape) :] == shape and field.dtype == dtype, f"{name} of {codec.scheme}"


def reads_packed(codec: Codec) -> None:
    """Scores and sums of packed codes are those of decoded blocks."""
    heads, size = codec.geometry.kv_heads, codec.geometry.head_size
    x_NTC = torch.randn(2, codec.block, heads * size)
    fields = codec.encode(x_NTC, Context())
    decoded = codec.decode(fields, Context()).float().unflatten(-1, (heads, size)).transpose(1, 2).flatten(0, 1)
    packed = codec.packed_reader.view_blocks({name: field[:, None] for name, field in fields.items()}, 0)
    q, p = torch.randn(2 * heads, 4, size), torch.rand(2 * heads, 4, codec.block)
    for found, expected in (
        (codec.packed_reader.scores(q, packed), q @ decoded.mT),
        (codec.packed_reader.mix(p, packed), p @ decoded),
    ):
        assert feeding.error(found, expected) < 0.03, f"{codec.scheme}"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_what_is_admitted_encodes_and_decodes_and_the_rest_is_refused_with_a_sentence(shard, known, record_property):
    draw, told = random.Random(shard), Counter()
    for number in range(COUNT // SHARDS):
        drawn, geometry = recipe(draw, known), draw.choice(GEOMETRIES)
        if checked(drawn.check) is None:
            told["refused"] += 1
            continue
        assert Recipe.from_json(drawn.to_json()) == drawn
        if checked(drawn.check, geometry) is None:
            told["refused for a geometry"] += 1
            continue
        try:
            encodes_and_decodes(drawn, geometry)
        except Exception as error:
            error.add_note(f"recipe {number} of shard {shard}, {geometry}: {drawn.to_json()}")
            raise
        told["encoded"] += 1
        told["with another setting"] += any(
            one not in known[slot] for each in drawn.schemes for slot, one in each.stages
        )
    record_property("kvq", f"{dict(told)}")
    assert told["encoded"] >= COUNT // SHARDS / 8 and told["with another setting"] >= COUNT // SHARDS / 16, told
