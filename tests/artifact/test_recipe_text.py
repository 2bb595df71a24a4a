"""Recipes as they are written: names, files and settings; what is refused; and names that no other recipe has."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvq_runtime.artifact import recipe_text
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.recipes.h2o import HeavyHitters
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.feedback import QueryOrthogonal
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import Hadamard


def same(found: Recipe, expected: Recipe) -> bool:
    """Whether two recipes are equal but for their names."""
    return replace(found, name="r") == replace(expected, name="r")


def squat(rank: int) -> Recipe:
    recipe = preset("squat-2bit")
    return replace(recipe, key=replace(recipe.key, feedback=QueryOrthogonal(rank=rank)))


def aqua(key: Any, value: Any = ..., size: int = 16, first: int = 256) -> Recipe:
    """AQUA-KV with these predictors, or one of both; points of its grids, and of the first layer's."""
    scheme = Scheme(Grid(2, size, "all"), rotate=Hadamard("all"))
    below = replace(scheme, quantize=Grid(2, first, "all"), predict=Mean())
    both = replace(scheme, predict=key), replace(scheme, predict=key if value is ... else value)
    return Recipe("aqua", *both, "pre", {0: (below, below)})


# ---- what settings mean: against dataclasses made by hand ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("squat-2bit+key.feedback.rank=60", squat(60)),
        ("kivi-2bit+window.recent=32+window.block=32", preset("kivi-2bit-r32")),
        ("exact+policies.heavy=on", preset("h2o")),
        ("exact+policies.heavy=on+policies.heavy.share=1", replace(preset("exact"), policies=(HeavyHitters(1.0),))),
        ("aqua-2bit+position=post", replace(preset("aqua-2bit"), position="post")),
        ("aqua-2bit+key.predict.below=1,2+value.predict.below=[1, 2]", aqua(Linear(below=(1, 2)))),
        ("aqua-2bit+value.predict.below=", aqua(Linear(), Linear(below=()))),
        ("aqua-2bit+key.predict=none", aqua(None, Linear())),
        ("aqua-2bit+layers.0.key.quantize.size=64+layers.0.value.quantize.size=64", aqua(Linear(), first=64)),
        ("aqua-2bit+all.predict.storage=gptq4", aqua(Linear(storage="gptq4"))),
        ("aqua-2bit+all.quantize.size=64", aqua(Linear(), size=64, first=64)),
        (
            "aqua-2bit+all.quantize.size=64+layers.0.key.quantize.size=256+layers.0.value.quantize.size=256",
            aqua(Linear(), size=64),
        ),
        ("squat-2bit+key.feedback=none", preset("kivi-2bit")),
    ],
)
def test_settings_are_those_of_the_dataclasses(text, expected):
    assert same(read(text), expected)


def test_a_layer_begins_as_the_others_whatever_comes_first():
    plain = preset("higgs-2bit")
    key = replace(plain.key, rotate=Hadamard("head"))
    first = replace(key, quantize=replace(key.quantize, dim=4, size=64))
    settings = ["layers.2.key.quantize.size=64", "layers.2.key.quantize.dim=4", "key.rotate.group=head"]
    expected = replace(plain, key=key, layers={2: (first, plain.value)})
    made, reverse = (read("+".join(["higgs-2bit", *texts])) for texts in (settings, settings[::-1]))
    assert same(made, expected) and same(reverse, expected) and made.name == reverse.name


def test_a_kind_brings_its_defaults_also_where_they_need_another_setting():
    assert read("higgs-2bit+key.predict=linear").key.predict == Linear()
    found = read("aqua-2bit+key.rotate=basis+key.quantize=mixed+key.quantize.bits=8,4,2,1,1,0,0,0").key
    assert found.quantize == Mixed((8, 4, 2, 1, 1, 0, 0, 0)) and isinstance(found.predict, Linear)
    first = read("aqua-2bit+layers.0.key.quantize=exact+layers.0.key.predict=none+layers.0.key.rotate=none")
    assert first.layers[0][0].quantize == Exact() and isinstance(first.layers[0][1].predict, Mean)


@pytest.mark.parametrize("text", ["1", "1.0", "1e0"])
def test_one_number_has_one_json_however_it_is_written(text):
    """Else equal recipes would have artifacts of different bytes."""
    recipe = read(f"squat-2bit-paper+key.feedback.lam={text}")
    assert '"lam": 1.0' in json.dumps(recipe.to_json())


# ---- names ----


def test_a_changed_recipe_is_named_by_what_was_changed():
    assert read("squat-2bit+key.feedback.rank=60").name == "squat-2bit-key.feedback.rank-60"
    both = read("squat-2bit+key.feedback.rank=60+window.recent=32")
    assert both.name == "squat-2bit-window.recent-32-key.feedback.rank-60"
    assert both.summary == "squat-2bit with window.recent=32 key.feedback.rank=60"
    assert read("aqua-2bit+key.predict.below=1,2").name == "aqua-2bit-key.predict.below-1_2"
    assert read("squat-2bit+key.feedback.rank=0") == preset("squat-2bit")
    assert read("squat-2bit+key.feedback.rank=60+window.recent=128").name == "squat-2bit-key.feedback.rank-60"
    assert read("kivi-2bit+window.recent=64+window.block=32+all.quantize.bits=8+all.quantize.group=64").name.startswith(
        "kivi-2bit-"
    )
    assert read("squat-2bit+name=mine+key.feedback.rank=60").name == "mine"


@pytest.mark.parametrize(
    "name", ["subkv-2bit", "aqua-fisher-1bit", "svdq-shadow-online-2.25bit", "gear-2bit", "h2o-halves"]
)
def test_every_setting_is_printed_as_it_is_written(name):
    """All of them make the recipe out of another one, and setting them again changes nothing."""
    settings = "".join(f"+{path}={value}" for path, value in recipe_text.settings(preset(name)).items())
    assert read(name + settings) == preset(name)
    found = read("exact" + settings)
    assert same(replace(found, layers=preset(name).layers), preset(name))
    assert all(found.at(layer) == preset(name).at(layer) for layer in range(3))


# ---- files ----


def test_a_file_is_the_json_of_a_recipe_or_what_the_command_prints(tmp_path):
    stated = squat(60).to_json() | {"name": "mine"}
    (tmp_path / "a.json").write_text(json.dumps(stated))
    (tmp_path / "b.json").write_text(json.dumps({"name": "x", "bits": 3, "settings": stated}))
    for name in ("a", "b"):
        assert read(str(tmp_path / f"{name}.json")) == replace(squat(60), name="mine")
    changed = read(f"{tmp_path}/a.json+window.recent=32")
    assert changed.name == "mine-window.recent-32" and changed.key == squat(60).key


def test_a_file_with_a_presets_name_is_that_preset(tmp_path):
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(preset("squat-2bit").to_json()))
    assert read(str(path)) == preset("squat-2bit")
    path.write_text(json.dumps(squat(60).to_json()))
    with pytest.raises(ValueError, match="name=squat-2bit; that is another recipe, which comes with kvq"):
        read(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "edited.json: recipe: expected an object"),
        ('{"name": "a", "name": "b"}', "appears twice"),
        (json.dumps(preset("kivi-2bit").to_json() | {"name": "../x"}), r"name '../x'; use 1 to 64 of a-z"),
        (json.dumps(preset("kivi-2bit").to_json() | {"colour": 1}), r"unknown keys \['colour'\]"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, message):
    path = tmp_path / "edited.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read(str(path))
    with pytest.raises(ValueError, match="no such file"):
        read(str(tmp_path / "none.json"))


# ---- what is refused, with what is allowed there ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "squat-2bit+foo=1",
            "foo: no such setting; a recipe has position, key_bias, segment, window, key, value, layers",
        ),
        ("squat-2bit+key.feedback.rnk=1", "query_orthogonal has blocks, lam, rank, normalize, queries"),
        ("squat-2bit+key.feedback.rank=6.5", "key.feedback.rank=6.5; use a value like 0"),
        ("squat-2bit+key.feedback.queries=now", r"use one of \('after', 'before'\)"),
        ("squat-2bit+key.feedback.rank=-1", "squat-2bit.*: rank=-1; use 0 for all directions, or how many"),
        ("squat-2bit+key.rotate=x", "key.rotate=x; use one of basis, .*hadamard, .*none"),
        ("higgs-2bit+key.feedback.rank=1", "there is no key.feedback here: first set key.feedback to one of query_or"),
        ("higgs-2bit+all.quantize.bits=2", "key.quantize.bits: no such setting; grid has dim, size, group"),
        ("svdq-2.25bit-v4", "there are svdq-2bit-v4, .*prints settings: svdq-2bit-v4.PATH=VALUE is another"),
        ("h2o+policies.chunks=on", "two policies for one choice, heavy and chunks; set one of them to none"),
        ("higgs-2bit+key.rotate=basis", "higgs-2bit.*: a basis and mixed bits belong together"),
        ("higgs-2bit+name=aqua-2bit", "name=aqua-2bit; that is another recipe, which comes with kvq"),
        ("higgs-2bit+window.recent=1+window.recent=2", "window.recent is set to 1 and to 2; set it once"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        read(text)
    assert "\n" not in str(refused.value)
