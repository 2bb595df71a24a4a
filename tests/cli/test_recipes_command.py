"""`kvq recipes` and `kvq bytes`: the same recipes as `presets`, and bytes that add up."""

import json
import re
import time

import pytest

from kvq_runtime import recipe
from kvq_runtime.artifact import describe
from kvq_runtime.codec.codec import Codec

CONFIG = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "hidden_size": 4096}  # fmt: skip


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
    readers = {name: (row["kernel"], row["vllm"]) for name, row in rows.items()}
    assert readers["kivi-4bit"] == (True, "kernel") and readers["fisher-head-3bit"] == (True, "kernel")
    assert readers["fisher-3bit"] == (False, "decoded") and readers["aqua-2bit"] == (False, "no")
    advice, table, _ = kvq("recipes")[1].split("\n\n", 2)
    assert [line.split()[0] for line in table.splitlines()] == ["name", *rows]
    for line in advice.splitlines():
        name, bits = line.split()[:2]
        assert bits == f"{rows[name]['bits']:.2f}"
        assert all(one in presets for one in re.findall(r"[a-z-]+-[0-9.]+bit\b", line))


def test_one_recipe_is_shown_with_its_settings_and_a_family_is_listed(as_json, kvq, tmp_path):
    assert recipe.Recipe.from_json(as_json("recipes", "aqua-2bit")["settings"]) == recipe.preset("aqua-2bit")
    shown = kvq("recipes", "aqua-2bit")[1]
    assert "linear > hadamard > grid(dim=2 size=16 group=all)" in shown and "key.predict.ridge=0.001\n" in shown
    changed = as_json("recipes", "aqua-2bit+window.recent=32")["settings"]
    (tmp_path / "mine.json").write_text(json.dumps(as_json("recipes", "aqua-2bit+window.recent=32")))
    assert as_json("recipes", str(tmp_path / "mine.json"))["settings"] == changed
    assert changed["name"] == "aqua-2bit-window.recent-32" and changed["window"]["recent"] == 32
    code, _, err = kvq("recipes", "aqua-2bit+window.last=32")
    assert code == 2 and "window.last: no such setting; window has sinks, recent, block" in err
    family = {*recipe.families()["aqua_fisher"].presets}
    assert {row["name"] for row in as_json("recipes", "aqua-fisher")} == family
    code, _, err = kvq("recipes", "aqua-2bt")
    assert code == 3 and "aqua-2bit" in err


def test_bytes_of_models_that_are_not_there(kvq, as_json, tmp_path):
    rows = as_json("bytes", "higgs-2bit+window.recent=32", "aqua-2bit", "--model", "llama-3.1-8b", "--tokens", "131072")
    assert [row["recipe"] for row in rows] == ["16 bit", "higgs-2bit-window.recent-32", "aqua-2bit"]
    assert rows[0]["GiB at 131072"] == 16 and rows[1]["under 16 bit from"] < rows[2]["under 16 bit from"]
    held = rows[2]["bytes"][0]
    assert rows[2]["bits at 131072"] == pytest.approx(16 * held["total"] / held["exact"], abs=1e-3)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for model in (str(tmp_path), str(tmp_path / "config.json"), "32x8x128"):
        assert as_json("bytes", "aqua-2bit", "--model", model, "--tokens", "131072")[1]["bytes"] == rows[2]["bytes"]


def test_layers_that_slide_hold_their_window(as_json, tmp_path):
    slide = {"model_type": "gemma2", "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
    given = CONFIG | slide | {"head_dim": 128}
    for tokens, window in ((256, 256), (131072, 512)):
        (tmp_path / "config.json").write_text(json.dumps(given))
        _, row = as_json("bytes", "higgs-2bit", "--model", str(tmp_path), "--tokens", tokens, "--batch", "2")
        held, sliding = row["bytes"][0], window * 2 * 16 * 4096
        assert held["sliding"] == sliding and held["exact"] == tokens * 2 * 16 * 4096 + sliding
        given.pop("layer_types", None)  # transformers knows which slide


@pytest.mark.parametrize("given, why", [
    ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000; a whole number from 0 to 4096 is needed"),
    ({"head_dim": "128"}, "head_dim='128'; a whole number from 0 to 16384 is needed"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 for 32 layers"),
    ({"kv_lora_rank": 512, "model_type": "deepseek_v3"}, "is not a family that kvq serves; use a model of llama"),
])  # fmt: skip
def test_a_hostile_config_is_refused_in_a_sentence_and_at_once(given, why, kvq, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | given))
    begun = time.thread_time()
    code, _, err = kvq("bytes", "aqua-2bit", "--model", str(tmp_path))
    assert code == 2 and why in err, err
    assert time.thread_time() - begun < 2
