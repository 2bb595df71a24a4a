"""Recipes are JSON both ways, and what cannot be is refused in a sentence."""

import copy
import json

import pytest

from kvq_runtime.codec import codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.policies.evict import Evicting
from kvq_runtime.recipe import Recipe, Scheme, preset, presets
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.stage import Inputs

GEOMETRY = Geometry(layers=4, kv_heads=2, head_size=64)
PLAIN = Scheme(Rtn(2))


def test_every_preset_survives_json():
    for name, recipe in presets().items():
        again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
        assert again == recipe and again.summary == recipe.summary
        assert again.to_json() == recipe.to_json()
        assert recipe.name == name and recipe.summary
        assert recipe.check(GEOMETRY) is recipe and preset(name) == recipe


def test_every_preset_names_what_it_needs():
    """Nothing is fitted exactly when no tensor is expected; a chain has layers that read other layers."""
    for name, recipe in presets().items():
        specs = codec.all_specs(recipe, GEOMETRY)
        assert bool(specs) == recipe.fitted, name
        chained = any("weight" in n or "down" in n or "codes" in n or "hidden" in n for n in specs)
        assert recipe.cross_layer == chained, name
        if recipe.position == "pre":
            assert "positions" in recipe.needs, name
        held, dynamic = isinstance(recipe.policy("select"), Evicting), recipe.policy("window") is not None
        assert ("attention" in recipe.needs) == (dynamic or held), name
        assert recipe.arrival_dependent == (dynamic or held or recipe.fits_prompt), name


def given() -> dict:
    return copy.deepcopy(preset("aqua-2bit").to_json())


def changed(path: str, value) -> dict:
    recipe = given()
    at = recipe
    *parents, last = path.split("/")
    for part in parents:
        at = at[part]
    at[last] = value
    return recipe


UNKNOWN = [
    ("colour", "red", "recipe: unknown keys ['colour']"),
    ("key/quantize/colour", "red", "quantize grid: unknown keys ['colour']"),
    (
        "key/quantize/kind",
        "magic",
        "quantize={'kind': 'magic', 'dim': 2, 'size': 16, 'group': 'all'}; use an object with",
    ),
    (
        "key/quantize",
        "grid",
        "quantize='grid'; use an object with a kind of ['exact', 'grid', ",
    ),
    ("key/quantize/dim", True, "quantize grid: dim=True; expected a value like 2"),
    ("key/quantize/group", 0, "group=0; use at least 1"),
    ("key/rotate/group", 48, "group=48; a Hadamard group is a power of two"),
    ("key/predict/below", 1, "predict linear: below=1; expected a value like (1,)"),
    ("key/predict/below", [9], "below=[9]; inputs come from 1 to 8 layers below, each once"),
    ("key/predict/storage", "gptq7", "storage='gptq7'; use one of ('bf16', 'gptq4')"),
    ("window/sinks", -1, "sinks=-1; use a whole number from 0 to 1048576"),
    ("position", "middle", "aqua-2bit: position='middle'; use one of ('pre', 'post', 'segment')"),
    ("name", 7, "recipe: name must be text, not 7"),
    ("layers/0", {"key": {}}, "recipe layer: unknown keys [], missing keys ['value']"),
]


@pytest.mark.parametrize(("path", "value", "says"), UNKNOWN)
def test_what_is_unknown_is_refused_and_named(path, value, says):
    with pytest.raises(ValueError) as refused:
        Recipe.from_json(changed(path, value))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize("nothing", [None, [], "aqua-2bit", 3])
def test_a_recipe_is_an_object(nothing):
    with pytest.raises(ValueError, match="expected an object"):
        Recipe.from_json(nothing)


def test_defaults_may_be_left_out():
    scheme = {"quantize": {"kind": "grid"}}
    recipe = Recipe.from_json({"name": "small", "key": scheme, "value": scheme})
    assert recipe == Recipe("small", Scheme(Grid()), Scheme(Grid()))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("r", PLAIN, PLAIN, "sideways"), "use one of .*segment"),
        (Recipe("r", Scheme(Exact(), predict=Mean()), PLAIN), "drop predict, rotate and axis"),
        (Recipe("r", PLAIN, PLAIN, layers={4: (PLAIN, PLAIN)}), "the model has 4"),
        (Recipe("r", Scheme(Rtn(2, 48)), PLAIN), r"layer 0 key: group=48 does not divide 128; use one of"),
        (Recipe("r", Scheme(Grid(8, 256, 4)), PLAIN), "no multiple of dim=8"),
        (Recipe("r", Scheme(Rtn(2), rotate=Hadamard(256)), PLAIN), "group=256 does not divide the width 128"),
    ],
)
def test_check_says_what_cannot_be(recipe, message):
    with pytest.raises(ValueError, match=message):
        recipe.check(GEOMETRY)


def test_inputs_of_a_prediction():
    """Keys read keys below, values this layer's keys and values below; with nothing underneath, the mean."""
    scheme = Scheme(Grid(), predict=Linear(below=(1, 2)))
    assert scheme.inputs(0, "key") == Inputs() and isinstance(scheme.predictor(0, "key"), Mean)
    assert scheme.inputs(1, "key") == Inputs(below=(1,))
    assert scheme.inputs(3, "value") == Inputs(keys=True, below=(1, 2))
    keys_only = Scheme(Grid(), predict=Linear(below=()))
    assert keys_only.inputs(0, "value") == Inputs(keys=True)
    assert isinstance(keys_only.predictor(2, "key"), Mean)
    both = Scheme(Grid(), predict=Linear(below=(1, 2), both=True))
    assert both.inputs(0, "value") == Inputs() and isinstance(both.predictor(0, "value"), Mean)
    assert both.inputs(1, "key") == Inputs(below=(1,), both=True) and both.inputs(1, "key").tokens == 2
    assert both.inputs(2, "value") == Inputs(True, (1, 2), True) and both.inputs(2, "value").tokens == 5


def test_a_name_that_is_none_is_answered_with_names():
    with pytest.raises(ValueError, match=r"no recipe 'aqua-5bit'; there are .*aqua-2bit"):
        preset("aqua-5bit")
    with pytest.raises(ValueError, match=r"there are names that begin with aqua, exact, fisher, gear"):
        preset("nosuch")
