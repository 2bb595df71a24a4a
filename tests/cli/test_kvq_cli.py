"""The commands, as a user runs them: what they print, as text and as JSON, and what they return."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import many_versions as many
import pytest
import tiny_artifact as tiny

from kvq_calib.cli import subcommands
from kvq_runtime.artifact import header
from kvq_runtime.cli import main, names, table
from kvq_runtime.geometry import MODELS
from kvq_runtime.registry import resolve
from kvq_runtime.registry.local import LocalRegistry

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
    assert as_json("list") == [] and "is not there yet; kvq-calibrate publishes artifacts" in kvq("list")[1]
    code, _, err = kvq("show", NAME)
    assert code == 3 and "there is no such folder yet; kvq-calibrate publishes artifacts" in err


def test_a_variable_that_names_no_registry_is_asked_only_where_it_counts(store, kvq, tmp_path, monkeypatch):
    """A copy begins with `KVQ_REGISTRY` set to it already; a path and an address need no registry of one's own."""
    mirror, file = f"file://{tmp_path}/mirror", tmp_path / "tiny.safetensors"
    file.write_bytes(tiny.data(0))
    monkeypatch.setenv("KVQ_REGISTRY", mirror)
    assert kvq("list")[0] == 3 and kvq("history", NAME)[0] == 3
    code, _, err = kvq("show", NAME)
    assert code == 3 and "no artifact tiny-2bit" in err and "there is no such folder yet" in err
    assert kvq("verify", file)[0] == 0
    assert kvq("copy", NAME, mirror, "--registry", store.url)[0] == 0 and kvq("show", NAME)[0] == 0


def test_list_goes_on_after_a_damaged_name(store, kvq):
    store.publish("whole", tiny.data())
    (store.events_folder(NAME) / "00000003.json").write_text("torn")
    code, out, _ = kvq("list")
    assert code == 1 and "cannot be read" in out and "whole" in out


def test_search_goes_on_after_what_cannot_be_read(store, kvq, monkeypatch):
    """A header that an older kvq wrote, or another program; and a damaged name."""
    with monkeypatch.context() as older:
        older.setattr(header, "summary", lambda about: {})
        store.publish("odd", tiny.resealed(provenance={"model": ["x"]}))
    store.publish("whole", tiny.data())
    (store.events_folder(NAME) / "00000003.json").write_text("torn")
    code, out, _ = kvq("search", "--model", "tiny-model", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 1 and set(rows) == {"odd", "whole", NAME} and rows["whole"]["sha256"]
    assert rows["odd"]["version"] == "1.0.0" and "cannot be read: " in rows["odd"]["recipe"]
    assert "provenance: model ['x']" in rows["odd"]["recipe"] and "cannot be read: " in rows[NAME]["recipe"]
    code, out, _ = kvq("search")
    assert code == 1 and out.count("cannot be read") == 2 and kvq("search", "--name", "whole")[0] == 0


def test_show_has_everything_about_a_version(store, as_json, kvq):
    found = resolve.resolve(NAME)
    result = {"recipe": "tiny", "perplexity": 12.5, "relative": 0.0004792, "top1": 0.9933}
    about = {"text": {"source": "book"}, "windows": 4, "length": 64}
    store.add_evaluation(
        {"artifact": found.sha256, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": result}
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
    (lead,), top, evaluations, fit = (part.splitlines() for part in out.split("\n\n"))
    assert lead == f"{NAME} 1.0.1; 6 bits; usable: perplexity +0.0%, in use; production"
    assert code == 0 and ["fingerprint.qk_norm", "no"] in [line.split() for line in top]
    assert [line.split() for line in evaluations[1:]] == [
        ["text", "windows", "length", "perplexity", "relative", "top1"],
        ["book", "4", "64", "12.5", "+0.05%", "99.33%"],
    ]
    assert ["fingerprint.rope.rope_theta", "10000"] in [line.split() for line in top]
    assert fit[1].split()[:2] == ["layer", "key"] and [line.split()[0] for line in fit[2:]] == ["0", "1"]
    store.yank(NAME, "1.0.0", "wrong corpus")
    store.add_evaluation(many.record(resolve.resolve(f"{NAME}@1.0.0").sha256, 0.2))
    lossy = "too lossy: perplexity +20.0%, KL 0.2 nats, full encode; more than +10% and more than 0.1 nats"
    assert kvq("show", f"{NAME}@1.0.0")[1].startswith(f"{NAME} 1.0.0; 6 bits; {lossy}; yanked: wrong corpus\n\n")
    code, _, err = kvq("verify", f"{NAME}@1.0.0")
    assert code == 0 and f"{NAME} 1.0.0 is yanked: wrong corpus" in err


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
        "files": store.state(NAME).versions["1.0.0"].beside,
    }
    assert '\n  "name": "tiny-2bit",\n' in lock.read_text() and lock.read_text().count("\n") == 9
    assert {row["result"] for row in as_json("verify", out / "kvq.safetensors", "--lock", lock)} == {"ok"}
    shown = kvq("verify", f"{NAME}@1.0.0")[1]
    assert shown.startswith(f"{NAME} 1.0.0, sha256 {pulled['sha256']}, {len(tiny.data(0))} bytes\n{store.root}/blobs/")
    assert "finite       ok      no NaN, no infinity and nothing beyond 2^20 in any of them\n" in shown
    assert shown.endswith(f"\n\nverified: {NAME} 1.0.0, asked for by number\n")
    assert "\nlock " not in shown
    *_, row, _, last = kvq("verify", f"{NAME}@1.0.0", "--lock", lock)[1].splitlines()
    assert row.split()[:2] == ["lock", "ok"] and last == f"verified: {NAME} 1.0.0, pinned by {lock}"
    lock.write_text(json.dumps(json.loads(lock.read_text())))  # one line, as they were once
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


def test_diff_shows_only_what_differs(store, as_json, kvq, tmp_path):
    assert as_json("diff", NAME, NAME) == []
    other = tmp_path / "other.safetensors"
    other.write_bytes(tiny.data(0, bits=3, environment="cuda"))
    rows = {(row["part"], row["name"]): row for row in as_json("diff", f"{NAME}@1.0.0", other)}
    assert rows["recipe", "key.quantize.bits"] == {
        "part": "recipe", "name": "key.quantize.bits", "a": 2, "b": 3, "change": 0.5,
    }  # fmt: skip
    assert rows["provenance", "environment"]["b"] == "cuda"
    assert {part for part, _ in rows} == {"evaluation", "size", "recipe", "provenance"}
    tensors = [row for row in as_json("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1") if row["part"] == "tensor"]
    a, b = (tiny.tiny(seed).tensors[tiny.WEIGHT].double() for seed in (0, 1))
    shown = kvq("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1")[1]
    assert re.search(rf"{NAME}@1.0.0 +{NAME}@1.0.1 +relative change\n", shown) and "|b - a| / |a| of tensors" in shown
    assert kvq("diff", NAME, NAME)[1] == f"{NAME} and {NAME} are equal\n"
    found = next(row["change"] for row in tensors if row["name"] == tiny.WEIGHT)
    assert found == pytest.approx(float((b - a).norm() / a.norm()))


def test_gc_and_doctor(store, as_json, kvq):
    assert as_json("doctor") == [] and kvq("doctor")[1] == f"nothing is wrong with {store.url}: 1 name\n"
    path = store.blob(store.put_blob(b"orphan"))
    assert [row["level"] for row in as_json("doctor")] == ["note"]
    assert as_json("gc") == []
    assert as_json("gc", "--grace", "0s", "--dry-run") == [{"removed": False, "path": f"blobs/sha256/{path.name}"}]
    assert as_json("gc", "--grace", "0s")[0]["removed"] and not path.exists()
    store.blob(resolve.resolve(NAME).sha256).unlink()
    code, out, _ = kvq("doctor")
    assert code == 1 and "blob is missing" in out and "publish the same bytes again" in out


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

    monkeypatch.setattr(names, "list_names", interrupted)
    assert kvq("list") == (130, "", "kvq: interrupted\n")
    monkeypatch.setattr(subcommands, "evaluate", interrupted)
    monkeypatch.setattr(subcommands, "compare", interrupted)
    assert kvq("eval", "higgs-2bit", "--model", "demo") == (130, "", "kvq: interrupted; nothing was kept\n")
    code, _, err = kvq("compare", "--model", "demo")
    assert code == 130 and "the same command goes on where it stopped" in err


def test_retries_of_the_hub_are_told_in_one_line(kvq, caplog):
    kvq("recipes", "exact")
    library = logging.getLogger("huggingface_hub.utils._http")
    main._RETRIES = main._first_retry()
    library.filters = [main._RETRIES]
    for number in range(1, 6):
        library.warning("'no route' thrown while requesting GET http://127.0.0.1:9")
        library.warning(f"Retrying in {number}s [Retry {number}/5].")
    library.warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "no answer from the Hub; trying again, for up to a minute", "something else",
    ]  # fmt: skip


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


def test_the_parts_of_a_table_say_which_row_is_which(capsys, monkeypatch):
    """At 40 cells those of `kvq bytes` began with the model alone, the same in each row."""
    monkeypatch.setattr(table, "_room", lambda: 40)
    rows = [{"model": "llama-3.1-8b", "recipe": f"higgs-{n}bit", "bits at 131072": n, "under 16 bit from": n}
            for n in (2, 3, 4)]  # fmt: skip
    table.print_table(rows, json=False)
    parts = capsys.readouterr().out.rstrip().split("\n\n")
    assert len(parts) > 1
    for part in parts:
        assert [line.split()[0] for line in part.splitlines()] == ["recipe", "higgs-2bit", "higgs-3bit", "higgs-4bit"]
    rows = [{"name": "demo-aqua-2bit", "version": f"1.0.{n}", "model": "demo", "corpus": "wikitext"} for n in range(3)]
    table.print_table([*rows, {**rows[0], "name": "other"}], json=False)
    for part in capsys.readouterr().out.rstrip().split("\n\n"):
        assert part.splitlines()[0].startswith("name            version  ")


def test_a_table_stays_within_the_terminal(capsys, monkeypatch):
    """Texts are broken at spaces, then columns are stacked with what tells rows apart; every word stays."""
    about = "keys are predicted from the layer below, values from both"
    rows = [{"model": "m", "recipe": f"aqua-{n}bit", "none": None, "bits": n, "sha256": "ab" * 20} for n in (2, 3)]
    broken = [row | {"sha256": about} for row in rows]
    for given, room, first in [
        (rows, None, "model  recipe     none  bits  sha256"), (rows, 90, "model  recipe     none  bits  sha256"),
        (rows, 65, "model  recipe     bits  sha256"), (rows, 60, "model  recipe     bits"),
        (rows, 20, "recipe     model"),
        (broken, 60, "model  recipe     bits  sha256"), (broken, 40, "model  recipe     bits"),
    ]:  # fmt: skip
        monkeypatch.setattr(table, "_room", lambda room=room: room)
        table.print_table(given, json=False)
        said = capsys.readouterr().out
        assert said.splitlines()[0] == first
        assert set(said.split()) >= {
            word for row in given for value in row.values() for word in str(value or "m").split()
        }
        if room and room != 20:  # in which a digest has no place
            assert max(map(len, said.splitlines())) <= room


def test_wide_characters_take_two_cells_and_a_long_field_many_lines(capsys, monkeypatch):
    wide, marked = "\u91cf\u5b50\u5316" * 8, "e\u0301"
    table.print_table([{"note": wide[:3], "by": 1}, {"note": marked, "by": 2}], json=False)
    assert capsys.readouterr().out == f"note    by\n{wide[:3]}   1\n{marked}        2\n"
    monkeypatch.setattr(table, "_room", lambda: 40)
    words = " ".join(["good"] * 20)
    table.print_record({"a": words, "note": wide}, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(table.cells(line) <= 40 for line in lines) and [line[:6] for line in lines] == [
        "a     ", "      ", "      ", "note  ", "      ",
    ]  # fmt: skip
    assert " ".join(line[6:] for line in lines[:3]) == words and "".join(line[6:] for line in lines[3:]) == wide


@pytest.mark.parametrize("given", ["kvq_runtime.cli.main recipes", "kvq_calib.cli.calibrate --list-models"])
def test_a_closed_pipe_is_no_error(given):
    """`kvq recipes | head -1` ends quietly."""
    root = Path(__file__).parents[2]
    command = f"{sys.executable} -m {given} --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.stderr) == ("[", "")


def test_bytes_of_models_that_are_not_there(kvq, as_json, tmp_path):
    rows = as_json("bytes", "higgs-2bit+window.recent=32", "aqua-2bit", "--model", "llama-3.1-8b", "--tokens", "131072")
    assert [row["recipe"] for row in rows] == ["16 bit", "higgs-2bit-window.recent-32", "aqua-2bit"]
    assert rows[0]["GiB at 131072"] == 16 and rows[1]["under 16 bit from"] < rows[2]["under 16 bit from"]
    held = rows[2]["bytes"][0]
    assert held["total"] == held["sequence"] + held["shared"]
    assert rows[2]["bits at 131072"] == pytest.approx(16 * held["total"] / held["exact"], abs=1e-3)
    both = as_json("bytes", "exact", "--model", "llama-3.1-8b", "--tokens", "131072", "--batch", "2")[0]
    assert both["GiB at 131072"] == 32
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json"), "32x8x128"):
        again = as_json("bytes", "aqua-2bit", "--model", model, "--tokens", "131072")[1]
        assert again["bytes"] == rows[2]["bytes"]
    slide = config | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
    (tmp_path / "config.json").write_text(json.dumps(slide))
    for tokens, beside in ((256, 256), (131072, 512)):
        stock, row = as_json("bytes", "aqua-2bit", "--model", str(tmp_path), "--tokens", tokens, "--batch", "2")
        held, beside = row["bytes"][0], beside * 2 * 16 * 4096
        assert held["sliding"] == beside and held["exact"] == tokens * 2 * 16 * 4096 + beside
        assert held["total"] == held["sequence"] + held["shared"] + beside
        assert row[f"bits at {tokens}"] == pytest.approx(16 * (held["total"] - beside) / (held["exact"] - beside), 1e-3)
        assert stock[f"GiB at {tokens}"] == round(held["exact"] / 2**30, 3)
    assert "Bytes of 16 layers that slide over a window of 512 tokens are in all" in kvq(
        "bytes", "aqua-2bit", "--model", str(tmp_path))[1]  # fmt: skip
    assert "Computed from shapes, not measured: all bytes of 1 row" in kvq("bytes", "aqua-2bit")[1]
    assert len(as_json("bytes", "higgs-2bit", "--model", "all")) == 2 * len(MODELS)
    given = ("bytes", "aqua-2bit", "--model")
    for other in ([], 7, None, {"hidden_size": 4096}):
        (tmp_path / "config.json").write_text(json.dumps(other))
        code, _, err = kvq(*given[:3], str(tmp_path))
        assert code == 2 and "no config.json of a model" in err and "give its shape as layers x KV heads" in err
    for name, value in (("multi_query", False), ("attention_chunk_size", 8192), ("layers_block_type", ["hybrid"] * 32)):
        (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
        code, _, err = kvq(*given[:3], str(tmp_path))
        assert code == 2 and f"config.json has {name}, as models have whose layers cache otherwise" in err
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["mamba", "conv"] * 16}))
    code, _, err = kvq(*given[:3], str(tmp_path))
    assert (
        code == 2 and "no layer of this model attends to all tokens alone (their types: conv, mamba): there is" in err
    )
    code, _, err = kvq("bytes", "aqua-2bit", "--model", "gpt-5")
    assert code == 3 and "--model gpt-5; use all, one of demo, qwen2.5-0.5b" in err
    assert kvq("bytes", "aqua-2bit-quanto", "--model", "2x2x24")[0] == 2


def test_bytes_takes_an_artifact_and_a_models_weights_are_said_to_be_none(store, as_json, kvq, tmp_path):
    rows = as_json("bytes", NAME, "--model", "28x4x128")
    assert [row["recipe"] for row in rows] == ["16 bit", "tiny"]
    weights = tmp_path / "model.safetensors"
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    code, _, err = kvq("verify", weights)
    assert code == 1 and "a model's weights, and no artifact of kvq" in err
