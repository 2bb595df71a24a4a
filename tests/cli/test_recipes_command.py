"""`kvq recipes`: which to take, families, filters, and all settings of one."""

import json
import re

import pytest

from kvq_runtime import recipe
from kvq_runtime.artifact import describe
from kvq_runtime.codec.codec import Codec


def test_recipes_are_listed_with_what_they_cost(as_json, kvq):
    rows = {row["name"]: row for row in as_json("recipes")}
    presets = recipe.presets()
    assert rows.keys() == presets.keys()
    assert rows["exact"]["bits"] == 16 and not rows["exact"]["fitted"]
    for name, row in rows.items():
        assert recipe.Recipe.from_json(row["settings"]) == presets[name]
    size = describe.REFERENCE_MODEL
    one = presets["aqua-2bit"]
    every = [Codec(one, i, h, size, {}).bits() for i in range(size.layers) for h in recipe.ROLES]
    assert rows["aqua-2bit"]["bits"] == pytest.approx(sum(every) / len(every), abs=1e-4)
    listed = [line.split()[0] for line in kvq("recipes", "--all")[1].partition("\n\n")[0].splitlines()]
    assert listed == ["name", *rows] and [rows[name]["bits"] for name in rows] == sorted(
        row["bits"] for row in rows.values()
    )


def test_which_recipe_to_take_comes_first_then_a_line_a_family(kvq):
    code, out, _ = kvq("recipes")
    advice, families, about = out.split("\n\n")
    assert code == 0 and len(advice.splitlines()) == 3
    for line in advice.splitlines():
        name, bits = line.split()[:2]
        cost = describe.recipe_row(recipe.preset(name), describe.REFERENCE_MODEL)["bits"]
        assert bits == f"{cost:.2f}"
        assert all(one in recipe.presets() for one in re.findall(r"[a-z-]+-[0-9.]+bit\b", line))
    rows = {line.split()[0]: line.split() for line in families.splitlines()[1:]}
    assert rows.keys() == {name.replace("_", "-") for name in recipe.families()}
    assert rows["aqua"][1] == str(len(recipe.families()["aqua"].presets)) and rows["rtn"][4] == "no"
    assert [float(row[2]) for row in rows.values()] == sorted(float(row[2]) for row in rows.values())
    assert "Qwen2.5-7B (28 layers" in about and "--family" in about


@pytest.mark.parametrize(
    "given, kept",
    [
        (["--bits", "1.5"], lambda name, row: row["bits"] <= 1.5),
        (["--bits", "2-2.2", "--unfitted"], lambda name, row: 2 <= row["bits"] <= 2.2 and row["fitted"] is not True),
        (["--family", "aqua-fisher"], lambda name, row: name.startswith("aqua-fisher")),
        (["--fitted", "--family", "polar"], lambda name, row: "polar" in name and row["fitted"] is True
         and not name.startswith("aqua")),
    ],
)  # fmt: skip
def test_recipes_are_filtered(given, kept, as_json, kvq):
    every = {row["name"]: row for row in as_json("recipes")}
    expected = [name for name, row in every.items() if kept(name, row)]
    assert [row["name"] for row in as_json("recipes", *given)] == expected != []
    listed = [line.split()[0] for line in kvq("recipes", *given)[1].partition("\n\n")[0].splitlines()]
    assert listed == ["name", *expected]


def test_the_name_of_a_family_lists_it_and_a_near_name_is_suggested(kvq, as_json):
    assert kvq("recipes", "aqua") == kvq("recipes", "--family", "aqua")
    assert as_json("recipes", "aqua", "--bits", "2-3") == as_json("recipes", "--family", "aqua", "--bits", "2-3")
    assert kvq("recipes", "exact")[1].startswith("name "), "a recipe has precedence"
    for wrong, near in {"aqua-2bt": "aqua-2bit", "higs": "higgs-4bit", "turbo-quant": "turboquant-3bit"}.items():
        code, _, err = kvq("recipes", wrong)
        assert code == 3 and near in err.partition("(")[0], err


def test_filters_are_refused_with_what_is_allowed(kvq):
    code, _, err = kvq("recipes", "--family", "aqu")
    assert code == 3 and "aqua-fisher" in err
    for bits in ("3-2", "two", "2-"):
        assert kvq("recipes", "--bits", bits)[0] == 2


def test_one_recipe_is_shown_with_its_settings(as_json, kvq, tmp_path):
    assert recipe.Recipe.from_json(as_json("recipes", "aqua-2bit")["settings"]) == recipe.preset("aqua-2bit")
    assert "linear > hadamard > grid(dim=2 size=16 group=all)" in kvq("recipes", "aqua-2bit")[1]
    assert "key.predict.ridge=0.001\n" in kvq("recipes", "aqua-2bit")[1]
    assert "by torch, in layer 0" in as_json("recipes", "aqua-2bit")["decode"]
    assert "no kernel" in as_json("recipes", "higgs-head-4bit")["decode"]
    changed = as_json("recipes", "aqua-2bit", "--set", "window.recent=32")["settings"]
    (tmp_path / "mine.json").write_text(json.dumps({"settings": changed}))
    assert as_json("recipes", str(tmp_path / "mine.json"))["settings"] == changed
    assert changed["name"] == "aqua-2bit-window.recent-32" and changed["key"]["recent"] == 32
    code, _, err = kvq("recipes", "aqua-2bit", "--set", "window.last=32")
    assert code == 2 and "window.last: no such setting; window has sinks, recent, block" in err
    assert kvq("recipes", "--set", "window.recent=32")[0] == 2
    code, _, err = kvq("recipes", "aqua-9bit")
    assert code == 3 and "aqua-2bit" in err
