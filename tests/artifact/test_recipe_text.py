"""Recipes as they are written: names, files and settings; what is refused; and names that no other recipe has."""

import json
import random
from dataclasses import fields, replace
from typing import Any

import pytest

from kvq_runtime.artifact import recipe_text
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.recipe import Recipe, Scheme, Window, preset, presets
from kvq_runtime.recipes.h2o import HeavyHitters
from kvq_runtime.registry.reference import is_name
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.feedback import QueryOrthogonal
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import Hadamard

PRESETS = presets()


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
        ("kivi-2bit+window.block=32+window.recent=32", preset("kivi-2bit-r32")),
        ("exact+policies.heavy=on", preset("h2o")),
        ("h2o+policies.heavy=none", preset("exact")),
        ("exact+policies.heavy=on+policies.heavy.share=1", replace(preset("exact"), policies=(HeavyHitters(1.0),))),
        ("aqua-2bit+position=post", replace(preset("aqua-2bit"), position="post")),
        ("aqua-2bit+window.sinks=64", replace(preset("aqua-2bit"), window=Window(sinks=64))),
        ("aqua-2bit+key.predict.storage=gptq4+value.predict.storage=gptq4", aqua(Linear(storage="gptq4"))),
        ("aqua-2bit+key.predict.below=1,2+value.predict.below=[1, 2]", aqua(Linear(below=(1, 2)))),
        ("aqua-2bit+value.predict.keys=false", aqua(Linear(), Linear(keys=False))),
        ("aqua-2bit+value.predict.below=", aqua(Linear(), Linear(below=()))),
        ("aqua-2bit+key.predict=none", aqua(None, Linear())),
        ("aqua-2bit+key.predict=mean+value.predict=mean", aqua(Mean())),
        ("aqua-2bit+layers.0.key.quantize.size=64+layers.0.value.quantize.size=64", aqua(Linear(), first=64)),
        ("aqua-2bit+all.predict.storage=gptq4", aqua(Linear(storage="gptq4"))),
        ("aqua-2bit+all.quantize.size=64", aqua(Linear(), size=64, first=64)),
        ("aqua-2bit+key.quantize.size=16+value.quantize.size=16+all.quantize.size=64", aqua(Linear(), first=64)),
        (
            "aqua-2bit+all.quantize.size=64+layers.0.key.quantize.size=256+layers.0.value.quantize.size=256",
            aqua(Linear(), size=64),
        ),
        ("aqua-2bit+all.predict=mean", aqua(Mean())),
        ("squat-2bit+key.feedback=none", preset("kivi-2bit")),
        ("squat-2bit+key.feedback.lam=1", preset("squat-2bit")),
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
    assert same(read("higgs-2bit", settings), expected) and same(read("higgs-2bit", settings[::-1]), expected)
    assert read("higgs-2bit", settings).name == read("higgs-2bit", settings[::-1]).name


def test_a_kind_brings_its_defaults_also_where_they_need_another_setting():
    assert read("higgs-2bit+key.predict=linear").key.predict == Linear()
    found = read("aqua-2bit+key.rotate=basis+key.quantize=mixed+key.quantize.bits=8,4,2,1,1,0,0,0").key
    assert found.quantize == Mixed((8, 4, 2, 1, 1, 0, 0, 0)) and isinstance(found.predict, Linear)
    first = read("aqua-2bit", [f"layers.0.key.{x}" for x in ("quantize=exact", "predict=none", "rotate=none")])
    assert first.layers[0][0].quantize == Exact() and isinstance(first.layers[0][1].predict, Mean)


@pytest.mark.parametrize("text", ["1", "1.0", "1e0"])
def test_one_number_has_one_json_however_it_is_written(text):
    """Else equal recipes would have artifacts of different bytes."""
    recipe = read(f"squat-2bit-paper+key.feedback.lam={text}")
    assert type(recipe.key.feedback.lam) is float
    assert '"lam": 1.0' in json.dumps(recipe.to_json())


# ---- names ----


def test_a_changed_recipe_is_named_by_what_was_changed():
    assert read("squat-2bit+key.feedback.rank=60").name == "squat-2bit-key.feedback.rank-60"
    assert read("squat-2bit", ["key.feedback.rank=60"]) == read("squat-2bit+key.feedback.rank=60")
    both = read("squat-2bit+key.feedback.rank=60+window.recent=32")
    assert both.name == "squat-2bit-window.recent-32-key.feedback.rank-60"
    assert both.summary == "squat-2bit with window.recent=32 key.feedback.rank=60"
    assert read("aqua-2bit+key.predict.below=1,2").name == "aqua-2bit-key.predict.below-1_2"
    assert read("squat-2bit+key.feedback.rank=0") == preset("squat-2bit")
    assert read("squat-2bit+name=mine+key.feedback.rank=60").name == "mine"


def variants() -> list[str]:
    """Settings of the integers and shares of every preset, one step off, many of them refused."""
    found = []
    for name, recipe in PRESETS.items():
        found += [
            f"{name}+window.{setting.name}={getattr(recipe.window, setting.name) + 1}" for setting in fields(Window)
        ]
        for role, scheme in (("key", recipe.key), ("value", recipe.value)):
            for slot, stage in scheme.stages:
                numbers = [f.name for f in fields(stage) if type(getattr(stage, f.name)) in (int, float)]
                found += [f"{name}+{role}.{slot}.{n}={2 * getattr(stage, n) + 1}" for n in numbers]
                found += [f"{name}+{role}.{slot}=none"]
            found += [
                f"{name}+layers.{layer}.{role}.{slot}.{n}={2 * getattr(stage, n)}" for layer in (0, 1) for n in numbers
            ]
    return found


@pytest.mark.slow
def test_no_two_recipes_have_one_name_and_a_name_can_be_published():
    """Over some hundred changes of single settings, and changes of two; the settings found make the recipe again."""
    chance, texts = random.Random(0), variants()
    chance.shuffle(texts)
    settings = {name: [t.partition("+")[2] for t in texts if t.startswith(f"{name}+")] for name in PRESETS}
    seen, refused = dict(PRESETS), 0
    for number, text in enumerate(texts[:300]):
        origin = preset(text.partition("+")[0])
        try:
            recipe = read(text, [chance.choice(settings[origin.name])] if number % 2 else [])
        except ValueError:
            refused += 1
            continue
        assert is_name(f"llama-3.2-3b-instruct-{recipe.name}")
        assert seen.setdefault(recipe.name, recipe) == recipe
        changes = recipe_text.differences(recipe, origin)
        again = read(origin.name, [f"{path}={value}" for path, value in changes.items()])
        assert again == recipe and again.to_json() == recipe.to_json()
        if changes:
            assert recipe.name not in PRESETS
    assert refused < 220 and len(seen) > len(PRESETS) + 80


@pytest.mark.parametrize("one", ["higgs-2bit", "aqua-2bit", "svdq-wf-2bit-v4", "h2o", "kivi-2bit-r32"])
@pytest.mark.parametrize("two", ["kivi-2bit", "subkv-2bit", "aqua-fisher-1bit", "svdq-online-2bit", "squat-pre-2bit"])
def test_differences_make_one_recipe_of_another(one, two):
    """Any preset from any other: in behaviour, since a layer that was named stays named."""
    settings = recipe_text.differences(preset(two), preset(one))
    found = read(one, [f"{path}={value}" for path, value in settings.items()])
    assert (found.key, found.value, found.window) == (preset(two).key, preset(two).value, preset(two).window)
    assert all(found.at(layer) == preset(two).at(layer) for layer in range(4))
    assert (found.policies, found.position) == (preset(two).policies, preset(two).position)


@pytest.mark.parametrize(
    "name", ["subkv-2bit", "aqua-fisher-1bit", "svdq-shadow-online-2.25bit", "gear-2bit", "h2o-halves"]
)
def test_every_setting_is_printed_as_it_is_written(name):
    """All of them make the recipe out of another one, and setting them again changes nothing."""
    settings = [f"{path}={value}" for path, value in recipe_text.settings(preset(name)).items()]
    assert read(name, settings) == preset(name)
    found = read("exact", settings)
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


def test_a_file_with_a_presets_name_is_called_as_the_same_settings_are(tmp_path):
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(squat(60).to_json()))
    assert read(str(path)) == read("squat-2bit+key.feedback.rank=60")
    assert read(f"{path}+window.recent=32").name == read("squat-2bit+key.feedback.rank=60+window.recent=32").name
    path.write_text(json.dumps(preset("squat-2bit").to_json()))
    assert read(str(path)) == preset("squat-2bit")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "edited.json: recipe: expected an object"),
        ("{", "edited.json: invalid JSON"),
        ('{"name": "a", "name": "b"}', "appears twice"),
        ('{"name": "A B"}', "missing keys"),
        (json.dumps(preset("kivi-2bit").to_json() | {"name": "../x"}), r"name '../x'; use 1 to 64 of a-z"),
        (json.dumps(preset("kivi-2bit").to_json() | {"name": "auto"}), "name=auto; that is another recipe"),
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
            "foo: no such setting; a recipe has name, position, window, key, value, all, layers, policies",
        ),
        ("squat-2bit+window.size=1", "window.size: no such setting; window has sinks, recent, block"),
        ("squat-2bit+key.rank=1", "a scheme has axis, predict, rotate, quantize, feedback, correct"),
        ("squat-2bit+key.feedback.rnk=1", "query_orthogonal has blocks, lam, rank, normalize, queries"),
        ("squat-2bit+key.feedback.rank=6.5", "key.feedback.rank=6.5; use a whole number"),
        ("squat-2bit+key.feedback.rank=true", "key.feedback.rank=true; use a whole number"),
        ("squat-2bit+key.feedback.lam=much", "key.feedback.lam=much; use a number"),
        ("squat-2bit+key.feedback.queries=now", "use after or before or averaged"),
        ("aqua-2bit+value.predict.keys=1", "value.predict.keys=1; use true or false"),
        ("aqua-2bit+value.predict.below=x", "use a list, each a whole number, as in 1,2"),
        ("squat-2bit+key.feedback.rank=-1", "squat-2bit.*: rank=-1; use 0 for all directions, or how many"),
        ("squat-2bit+window.block=0", "block=0; use a whole number from 1"),
        ("squat-2bit+key.rotate=x", "key.rotate=x; use one of basis, .*hadamard, .*none"),
        ("squat-2bit+key.quantize=none", "key.quantize=none; use one of even, exact, "),
        (
            "higgs-2bit+key.feedback.rank=1",
            "there is no key.feedback here: first key.feedback=KIND, one of query_ortho",
        ),
        ("higgs-2bit+layers.x.key.axis=token", "layers has N.key, N.value"),
        ("higgs-2bit+all=1", "all: no such setting; a scheme has axis, predict"),
        ("higgs-2bit+all.quantize.bits=2", "all.quantize.bits: no such setting; grid has dim, size, group"),
        ("higgs-2bit+all.feedback.rank=2", "there is no all.feedback here: first all.feedback=KIND"),
        ("svdq-2.25bit-v4", "there are svdq-2bit-v4, .*prints settings: svdq-2bit-v4.PATH=VALUE is another"),
        ("higgs-2bit+policies.heavy.share=1", "there is no policies.heavy here: first policies.heavy=on"),
        ("higgs-2bit+policies.light=on", "policies has chunks, dynamic, first_tokens, heavy"),
        ("h2o+policies.heavy=yes", "policies.heavy=yes; use on or none"),
        ("h2o+policies.chunks=on", "policies.chunks beside policies.heavy: a recipe has one of the two"),
        ("higgs-2bit+key.rotate=basis", "higgs-2bit.*: a basis and mixed bits belong together"),
        ("higgs-2bit+name=aqua-2bit", "name=aqua-2bit; that is another recipe, which comes with kvq"),
        ("higgs-2bit+window.recent=1+window.recent=2", "window.recent is set to 1 and to 2; set it once"),
        ("higgs-9bit+window.recent=1", "no recipe 'higgs-9bit'; there are"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        read(text)
    assert "\n" not in str(refused.value)


def test_a_setting_without_a_value_and_settings_of_nothing():
    with pytest.raises(ValueError, match="setting 'window.recent'; write PATH=VALUE"):
        read("higgs-2bit", ["window.recent"])
    with pytest.raises(ValueError, match=r"--set window.recent=1 changes recipes; name those"):
        recipe_text.with_settings(["demo-aqua-2bit@1.0.0"], ["window.recent=1"])
    texts = recipe_text.with_settings(["demo-aqua-2bit", "higgs-2bit", "a.json", "auto"], ["window.recent=1"])
    assert texts == ["demo-aqua-2bit", "higgs-2bit+window.recent=1", "a.json+window.recent=1", "auto"]


def test_two_recipes_of_one_name_are_refused(tmp_path):
    one, two = replace(squat(5), name="mine"), replace(squat(6), name="mine")
    assert recipe_text.distinct([one, preset("exact"), one]) == [one, preset("exact")]
    with pytest.raises(ValueError, match="two recipes are called mine"):
        recipe_text.distinct([one, two])
