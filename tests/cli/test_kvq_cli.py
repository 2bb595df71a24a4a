"""The commands, as a user runs them: what they print, as text and as JSON, and what they return."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_artifact as tiny

from kvq_runtime import recipe
from kvq_runtime.artifact import describe
from kvq_runtime.cli import commands, table
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import MODELS
from kvq_runtime.registry import resolve
from kvq_runtime.registry.local.registry import LocalRegistry

NAME = "tiny-2bit"


@pytest.fixture
def store() -> LocalRegistry:
    """The user's own registry, with two versions."""
    store = resolve.open_registry()
    store.publish(NAME, tiny.data(0), attachments={"README.md": b"# card", "error.png": b"png"})
    store.publish(NAME, tiny.data(1))
    return store


def test_list(store, kvq, as_json):
    assert as_json("list") == [
        {
            "name": NAME,
            "production": None,
            "newest": "1.0.1",
            "versions": 2,
            "recipe": "tiny",
            "model": "tiny-model",
            "published": store.state(NAME).versions["1.0.1"].at,
        }
    ]
    code, out, _ = kvq("list")
    assert code == 0 and out.splitlines()[0].split()[:3] == ["name", "production", "newest"] and NAME in out


def test_an_empty_registry_lists_nothing(kvq, as_json):
    assert as_json("list") == [] and "is empty; kvq-calibrate publishes artifacts" in kvq("list")[1]
    code, _, err = kvq("show", NAME)
    assert code == 3 and "it is empty; kvq-calibrate publishes artifacts" in err


def test_list_goes_on_after_a_damaged_name(store, kvq):
    store.publish("whole", tiny.data())
    (store.events_folder(NAME) / "00000003.json").write_text("torn")
    code, out, _ = kvq("list")
    assert code == 1 and "cannot be read" in out and "whole" in out


def test_show_has_everything_about_a_version(store, as_json, kvq):
    found = resolve.resolve(NAME)
    result = {"perplexity": 12.5}
    store.add_evaluation(
        {"artifact": found.sha256, "corpus": "c" * 64, "protocol": {}, "environment": {}, "result": result}
    )
    store.promote(NAME, "1.0.1")
    shown = as_json("show", NAME)
    assert (shown["version"], shown["sha256"], shown["aliases"]) == ("1.0.1", found.sha256, ["production"])
    assert shown["chosen_because"] == "production points to it"
    assert shown["evaluations"][0]["result"] == result
    assert shown["provenance"]["model"] == "tiny-model" and shown["fit"]["layers"][1]["key"] == 0.125
    assert shown["recipe"]["bits"] == pytest.approx(2 + 32 / 8)  # 2 bits, and step and low of 16 per group of 8
    assert as_json("show", f"{NAME}@1.0.0")["files"].keys() == {"README.md", "error.png"}
    code, out, _ = kvq("show", NAME)
    top, evaluations, fit = (part.splitlines() for part in out.split("\n\n"))
    assert code == 0 and ["fingerprint.qk_norm", "no"] in [line.split() for line in top]
    assert [line.split() for line in evaluations[1:]] == [["perplexity"], ["12.5"]]
    assert fit[1].split()[:2] == ["layer", "key"] and [line.split()[0] for line in fit[2:]] == ["0", "1"]


def test_pull_copies_checks_and_locks(store, as_json, kvq, tmp_path):
    lock, out = tmp_path / "kvq.lock", tmp_path / "out"
    pulled = as_json("pull", f"{NAME}@1.0.0", "-o", out, "--lock", lock)
    assert (out / "kvq.safetensors").read_bytes() == tiny.data(0)
    assert (out / "README.md").read_bytes() == b"# card"
    assert sorted(pulled["files"]) == sorted(str(path) for path in out.iterdir())
    assert json.loads(lock.read_text()) == {
        "reference": f"{NAME}@1.0.0",
        "registry": store.url,
        "name": NAME,
        "version": "1.0.0",
        "sha256": pulled["sha256"],
        "size": len(tiny.data(0)),
    }
    assert {row["result"] for row in as_json("verify", out / "kvq.safetensors", "--lock", lock)} == {"ok"}
    rows = {row["check"]: row["result"] for row in as_json("verify", out / "kvq.safetensors")}
    assert rows["finite"] == "ok" and "not compared" in rows["sha256"]
    assert kvq("pull", out / "kvq.safetensors")[0] == 2


def test_pull_refuses_a_damaged_blob_and_writes_nothing(store, kvq, tmp_path):
    for sha256 in (resolve.resolve(NAME).sha256, store.state(NAME).versions["1.0.0"].files["README.md"]["sha256"]):
        path = store.blob(sha256)
        whole = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(whole[:-1] + b"?")
        given = NAME if len(whole) > 100 else f"{NAME}@1.0.0"
        code, _, err = kvq("pull", given, "-o", tmp_path / "out")
        assert code == 1 and "sha256" in err and not (tmp_path / "out").exists()
        path.write_bytes(whole)


def test_verify_says_which_check_failed(store, kvq, tmp_path):
    path = tmp_path / "kvq.safetensors"
    path.write_bytes(tiny.resealed(schema=7))
    code, out, err = kvq("verify", path)
    assert code == 1 and out == "" and err.startswith(f"kvq: {path}: schema: the file has 7")


def test_aliases_move_and_move_back(store, as_json, kvq):
    assert as_json("promote", f"{NAME}@1.0.0") == {
        "name": NAME, "alias": "production", "version": "1.0.0", "before": None,
    }  # fmt: skip
    assert as_json("promote", f"{NAME}@1.0.1", "--expect", "1.0.0")["before"] == "1.0.0"
    code, _, err = kvq("promote", f"{NAME}@1.0.0", "--expect", "1.0.0")
    assert code == 4 and "somebody moved it" in err
    assert as_json("rollback", NAME)["version"] == "1.0.0"
    assert kvq("rollback", NAME)[0] == 3
    code, _, err = kvq("promote", NAME)
    assert code == 2 and "name the version" in err
    assert kvq("yank", f"{NAME}@1.0.0", "--reason", "bad")[0] == 4
    assert as_json("yank", f"{NAME}@1.0.1", "--reason", "bad")["yanked"] == "bad"
    changes = [(row["change"], row["version"]) for row in as_json("history", NAME)]
    assert changes == [
        ("publish", "1.0.0"), ("publish", "1.0.1"), ("promote", "1.0.0"), ("promote", "1.0.1"),
        ("rollback", "1.0.0"), ("yank", "1.0.1"),
    ]  # fmt: skip


def test_diff_shows_only_what_differs(store, as_json, tmp_path):
    assert as_json("diff", NAME, NAME) == []
    other = tmp_path / "other.safetensors"
    other.write_bytes(tiny.data(0, bits=3, environment="cuda"))
    rows = {(row["part"], row["name"]): row for row in as_json("diff", f"{NAME}@1.0.0", other)}
    assert rows["recipe", "key.quantize.bits"] == {
        "part": "recipe", "name": "key.quantize.bits", "a": 2, "b": 3, "change": 0.5,
    }  # fmt: skip
    assert rows["provenance", "environment"]["b"] == "cuda"
    assert {part for part, _ in rows} == {"recipe", "provenance"}
    tensors = [row for row in as_json("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1") if row["part"] == "tensor"]
    a, b = (tiny.tiny(seed).tensors[tiny.WEIGHT].double() for seed in (0, 1))
    found = next(row["change"] for row in tensors if row["name"] == tiny.WEIGHT)
    assert found == pytest.approx(float((b - a).norm() / a.norm()))


def test_gc_and_doctor(store, as_json, kvq):
    assert as_json("doctor") == [] and kvq("doctor")[1] == f"nothing is wrong with {store.url}\n"
    path = store.blob(store.put_blob(b"orphan"))
    assert [row["level"] for row in as_json("doctor")] == ["note"]
    assert as_json("gc") == []
    assert as_json("gc", "--grace", "0s", "--dry-run") == [{"removed": False, "path": f"blobs/sha256/{path.name}"}]
    assert as_json("gc", "--grace", "0s")[0]["removed"] and not path.exists()
    store.blob(resolve.resolve(NAME).sha256).unlink()
    code, out, _ = kvq("doctor")
    assert code == 1 and "blob is missing" in out and "publish the same bytes again" in out


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
    assert rows["aqua"][1] == str(len(recipe.families()["aqua"])) and rows["rtn"][4] == "no"
    assert [float(row[2]) for row in rows.values()] == sorted(float(row[2]) for row in rows.values())
    assert "Qwen2.5-7B (28 layers" in about and "--family" in about


@pytest.mark.parametrize(
    "given, kept",
    [
        (["--bits", "1.5"], lambda name, row: row["bits"] <= 1.5),
        (["--bits", "2-2.2", "--unfitted"], lambda name, row: 2 <= row["bits"] <= 2.2 and row["fitted"] is not True),
        (["--family", "aqua-klt"], lambda name, row: name.startswith("aqua-klt")),
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


def test_filters_are_refused_with_what_is_allowed(kvq):
    code, _, err = kvq("recipes", "--family", "aqu")
    assert code == 3 and "aqua-klt" in err
    for bits in ("3-2", "two", "2-"):
        assert kvq("recipes", "--bits", bits)[0] == 2


def test_summaries_stand_alone():
    assert not [one.name for one in recipe.presets().values() if "the same" in one.summary or not one.summary]


def test_one_recipe_is_shown_with_its_settings(as_json, kvq, tmp_path):
    assert recipe.Recipe.from_json(as_json("recipes", "aqua-2bit")["settings"]) == recipe.preset("aqua-2bit")
    assert "linear > hadamard > grid(dim=2 size=16 group=all)" in kvq("recipes", "aqua-2bit")[1]
    assert "key.predict.ridge=0.001\n" in kvq("recipes", "aqua-2bit")[1]
    changed = as_json("recipes", "aqua-2bit", "--set", "window.recent=32")["settings"]
    (tmp_path / "mine.json").write_text(json.dumps({"settings": changed}))
    assert as_json("recipes", str(tmp_path / "mine.json"))["settings"] == changed
    assert changed["name"] == "aqua-2bit-window.recent-32" and changed["key"]["recent"] == 32
    code, _, err = kvq("recipes", "aqua-2bit", "--set", "window.last=32")
    assert code == 2 and "window.last: no such setting; window has sinks, recent, block" in err
    assert kvq("recipes", "--set", "window.recent=32")[0] == 2
    code, _, err = kvq("recipes", "aqua-9bit")
    assert code == 3 and "aqua-2bit" in err


@pytest.mark.parametrize(
    "given, code",
    [
        ([], 2),
        (["nonsense"], 2),
        (["show", "../x"], 2),
        (["show", "a@../x"], 2),
        (["show", "nothing"], 3),
        (["show", "nothing.safetensors"], 3),
        (["verify", "nothing", "--lock", "nothing.lock"], 3),
        (["list", "--registry", "hf://org"], 1),  # offline
        (["list", "--registry", "hf://../x"], 2),
        (["show", "hf://org/../x"], 2),
        (["show", "hf://org"], 2),
        (["gc", "--grace", "soon"], 2),
        (["yank", "a@1.0.0"], 2),
        (["--help"], 0),
        (["--version"], 0),
    ],
)
def test_exit_codes(given, code, kvq):
    found, out, err = kvq(*given)
    assert found == code and (out if code == 0 else err)


def test_interrupted(kvq, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "list_names", interrupted)
    assert kvq("list")[0] == 130


def test_help_teaches(kvq):
    top = kvq("--help")[1]
    for command in ("list", "show", "pull", "verify", "promote", "rollback", "yank", "history", "diff", "gc", "doctor"):
        code, out, _ = kvq(command, "--help")
        assert code == 0 and "example\n    kvq " + command in out and "130  interrupted" in out
        assert f"    {command} " in top
    assert "examples" in top and "KVQ_REGISTRY" in top and "4    conflict" in top


def test_what_files_say_cannot_move_the_cursor(capsys):
    table.print_table([{"name": "a\x1b[2J\nb", "n": 1.0}, {"name": "c", "n": None}], json=False)
    assert capsys.readouterr().out == "name         n\na\\x1b[2J\\nb  1\nc\n"
    table.print_record({"a": {"b": [1, 2], "c": [{"d": True}]}, "e": None}, json=False)
    assert capsys.readouterr().out == "a.b      1, 2\na.c.0.d  yes\ne\n"


def test_a_closed_pipe_is_no_error(tmp_path):
    """`kvq recipes | head -1` ends quietly."""
    root = Path(__file__).parents[2]
    command = f"{sys.executable} -m kvq_runtime.cli.main recipes --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.stderr) == ("[", "")


def test_bytes_of_models_that_are_not_there(kvq, as_json, tmp_path):
    rows = as_json("bytes", "higgs-2bit+window.recent=32", "aqua-2bit", "--model", "llama-3.1-8b", "--tokens", "131072")
    assert [row["recipe"] for row in rows] == ["16 bit", "higgs-2bit-window.recent-32", "aqua-2bit"]
    assert rows[0]["GiB at 131072"] == 16 and rows[1]["under 16 bit from"] < rows[2]["under 16 bit from"]
    held = rows[2]["bytes"][0]
    assert held["total"] == sum(held["sequence"].values()) + sum(held["shared"].values())
    assert rows[2]["bits at 131072"] == pytest.approx(16 * held["total"] / held["exact"], abs=1e-3)
    both = as_json("bytes", "exact", "--model", "llama-3.1-8b", "--tokens", "131072", "--batch", "2")[0]
    assert both["GiB at 131072"] == 32
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json"), "32x8x128"):
        again = as_json("bytes", "aqua-2bit", "--model", model, "--tokens", "131072")[1]
        assert again["bytes"] == rows[2]["bytes"]
    assert "Computed from shapes, not measured: all bytes of 1 row" in kvq("bytes", "aqua-2bit")[1]
    assert len(as_json("bytes", "higgs-2bit", "--model", "all")) == 2 * len(MODELS)
    code, _, err = kvq("bytes", "aqua-2bit", "--model", "gpt-5")
    assert code == 3 and "--model gpt-5; use all, one of demo, qwen2.5-0.5b" in err
    assert kvq("bytes", "aqua-2bit-quanto", "--model", "2x2x24")[0] == 2
