"""The commands of a registry, as a user runs them: text, JSON and exit codes."""

import json

import many_versions as many
import pytest
import tiny_artifact as tiny

from kvq_runtime.cli import table
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


def test_list_goes_on_after_a_damaged_name(store, kvq, as_json, tmp_path):
    assert "is empty; kvq-calibrate publishes artifacts" in kvq("list", "--registry", tmp_path)[1]
    published = store.state(NAME).versions["1.0.1"].at
    row = {"name": NAME, "production": None, "newest": "1.0.1", "versions": 2, "recipe": "tiny", "model": "tiny-model"}
    assert as_json("list") == [row | {"published": published}]
    store.publish("whole", tiny.data())
    (store.events_folder(NAME) / "00000003.json").write_text("torn")
    code, out, _ = kvq("list")
    assert code == 1 and "cannot be read" in out and "whole" in out


def test_show_has_everything_about_a_version(store, as_json, kvq):
    found = resolve.resolve(NAME)
    store.add_evaluation(many.record(found.sha256, 0.0004792))
    store.promote(NAME, "1.0.1", force=True)
    shown = as_json("show", NAME)
    assert (shown["version"], shown["sha256"], shown["aliases"]) == ("1.0.1", found.sha256, ["production"])
    assert shown["chosen_because"] == "production points to it" and len(shown["evaluations"]) == 1
    assert shown["provenance"]["model"] == "tiny-model" and shown["fit"]["layers"][1]["key"] == 0.125
    assert shown["recipe"]["bits"] == pytest.approx(2 + 32 / 8)  # 2 bits, and step and low of 16 per group of 8
    assert as_json("show", f"{NAME}@1.0.0")["files"].keys() == {"README.md", "error.png"}
    code, out, _ = kvq("show", NAME)
    wide = [line.split()[0] for line in out.splitlines() if len(line) > 100]
    assert code == 0 and "fingerprint" not in out and not {*wide} - {"registry"}, "whose address is a single word"
    code, out, _ = kvq("show", NAME, "--verbose")
    (lead,), top, evaluations, fit = (part.splitlines() for part in out.split("\n\n"))
    assert code == 0 and lead.startswith(f"{NAME} 1.0.1; 6 bits; usable: perplexity +0.0%")
    assert lead.endswith("; production") and "+0.05%" in evaluations[2]
    assert ["fingerprint.rope.rope_theta", "10000"] in [line.split() for line in top]
    assert fit[1].split()[:2] == ["layer", "key"] and [line.split()[0] for line in fit[2:]] == ["0", "1"]
    store.yank(NAME, "1.0.0", "wrong corpus")
    store.add_evaluation(many.record(resolve.resolve(f"{NAME}@1.0.0").sha256, 0.2))
    out = kvq("show", f"{NAME}@1.0.0")[1]
    assert "; too lossy: perplexity +20.0%" in out and "; yanked: wrong corpus\n\n" in out
    assert f"{NAME} 1.0.0 is yanked: wrong corpus" in kvq("verify", f"{NAME}@1.0.0")[2]


def test_pull_copies_checks_and_locks(store, as_json, kvq, tmp_path):
    lock, out = tmp_path / "out" / "kvq.lock", tmp_path / "out"
    pulled = as_json("pull", f"{NAME}@1.0.0", "-o", out, "--lock", lock)
    assert (out / "kvq.safetensors").read_bytes() == tiny.data(0)
    assert (out / "README.md").read_bytes() == b"# card"
    assert {*pulled["files"], str(lock)} == {str(path) for path in out.iterdir()}
    pinned = json.loads(lock.read_text())
    assert (pinned["version"], pinned["sha256"], pinned["size"]) == ("1.0.0", pulled["sha256"], len(tiny.data(0)))
    for given in (out, f"{NAME}@1.0.0"):
        verified = as_json("verify", given, "--lock", lock)
        assert verified["sha256"] == pulled["sha256"] and {"sha256", "finite", "lock"} <= {*verified["passed"]}
    passed = as_json("verify", out / "kvq.safetensors")["passed"]
    assert "finite" in passed and "sha256" not in passed
    assert kvq("pull", out / "kvq.safetensors")[0] == 2
    (tmp_path / "file").touch()
    assert kvq("pull", NAME, "-o", tmp_path / "file")[0] == 2
    assert kvq("pull", NAME, "-o", tmp_path / "other", "--lock", tmp_path / "none" / "x")[0] == 3


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


def test_verify_names_the_failed_check(kvq, tmp_path):
    path = tmp_path / "kvq.safetensors"
    path.write_bytes(tiny.resealed(schema=7))
    code, out, err = kvq("verify", path)
    assert code == 1 and out == "" and err.startswith(f"kvq: {path}: schema: the file has 7")


def test_a_registry_of_the_environment_is_checked_where_it_is_read(store, kvq, tmp_path, monkeypatch):
    copy, file = f"file://{tmp_path}/copy", tmp_path / "tiny.safetensors"
    file.write_bytes(tiny.data(0))
    monkeypatch.setenv("KVQ_REGISTRY", copy)
    assert kvq("list")[0] == 3 and kvq("history", NAME)[0] == 3 and kvq("verify", file)[0] == 0
    assert kvq("copy", NAME, copy, "--registry", store.url)[0] == 0 and kvq("show", NAME)[0] == 0


def test_tables_align_and_control_no_terminal(capsys):
    table.print_table([{"name": "a\x1b[2J\nb", "n": 1.0}, {"name": "c", "n": None}], json=False)
    assert capsys.readouterr().out == "name         n\na\\x1b[2J\\nb  1\nc\n"
    table.print_record({"a": {"b": [1, 2], "c": [{"d": True}]}, "e": None}, json=False)
    assert capsys.readouterr().out == "a.b      1, 2\na.c.0.d  yes\ne\n"
    table.print_record({"a": ["long"] * 30, "b": "c" * 120}, json=False)
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [98, 85, 123]


def test_a_ratio_that_rounds_to_zero_has_no_sign():
    assert [table.percent(ratio) for ratio in (0.0123, -0.05, -4e-5)] == ["+1.23%", "-5.00%", "0.00%"]
