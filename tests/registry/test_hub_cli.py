"""The commands do on hf:// what they do on file://, and copy between the two."""

import json
import re

import pytest
import tiny
import tiny_artifact
import yaml
from hub_client import asked, clear

from kvq_runtime.cli import main as cli
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import resolve

NAME = "tiny-2bit"
CARD = b"""---
library_name: kvq
tags: [kvq, tiny]
license: mit
---
# tiny

```python
cache = KVQCache.from_pretrained("tiny-2bit", model=model)
```

![error](error.png)

Not evaluated yet: `kvq eval` does that.
"""


@pytest.fixture
def here(hub):
    """The user's own registry, with two versions and an evaluation."""
    here = resolve.open_registry()
    first = here.publish(NAME, tiny_artifact.data(0), attachments={"README.md": CARD, "error.png": b"png"})
    here.publish(NAME, tiny_artifact.data(1, corpus="b" * 64))
    about = {"text": {"source": "wiki", "split": "test"}, "windows": 4, "length": 256}
    result = {"recipe": "tiny", "perplexity": 12.5, "relative": 0.01, "kl": 0.025}
    here.add_evaluation(
        {"artifact": first.sha256, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": result}
    )
    return here


def test_a_dry_run_checks_and_writes_nothing(here, hub, kvq, as_json, monkeypatch):
    (planned,) = as_json("copy", f"{NAME}@1.0.0", "hf://org", "--dry-run")
    assert planned["result"] == "would be published" and planned["files"] == ["README.md", "error.png"]
    assert not hub.repos and all(line.startswith(("GET", "HEAD")) for line in asked(hub))
    code, _, err = kvq("copy", f"{NAME}@1.0.0", "hf://elsewhere", "--dry-run")
    assert code == 1 and "me is not a member of it" in err
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    code, _, err = kvq("copy", f"{NAME}@1.0.0", "hf://org", "--dry-run")
    assert code == 1 and "the token is read-only" in err
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = kvq("copy", f"{NAME}@1.0.0", "hf://org", "--dry-run")
    assert code == 1 and "no token to write with" in err


def test_a_copy_brings_everything_and_again_is_the_same(here, hub, as_json, kvq):
    (pushed,) = as_json("copy", f"{NAME}@1.0.0", "hf://org", "--private")
    assert pushed["result"] == "published" and pushed["evaluations"] == 1
    assert hub.repos[f"org/{NAME}"].private
    (again,) = as_json("copy", f"{NAME}@1.0.0", "hf://org")
    assert again["result"] == "was there already" and again["sha256"] == pushed["sha256"]
    shown = as_json("show", f"hf://org/{NAME}@1.0.0")
    assert shown["registry"] == "hf://org" and shown["evaluations"][0]["result"]["perplexity"] == 12.5
    repo = hub.repos[f"org/{NAME}"]
    text = hub.content(repo, repo.at("main").tree["README.md"]).decode()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "mit" and front["tags"] == ["kvq", "tiny"]
    metrics = front["model-index"][0]["results"][0]["metrics"]
    found = {metric["type"]: metric["value"] for metric in metrics}
    assert found == {"perplexity": 12.5, "kl_divergence": 0.025, "relative_perplexity": 0.01}
    assert f'KVQCache.from_pretrained("hf://org/{NAME}@1.0.0", model=model)' in text
    assert "![error](versions/1.0.0/error.png)" in text and "Not evaluated" not in text and "| wiki |" in text
    assert kvq("copy", "other@1.0.0", "hf://org")[0] == 3
    resolve.open_registry("hf://org").publish(NAME, tiny_artifact.data(9), version="1.1.0")
    code, _, err = kvq("copy", f"{NAME}@1.1.0", "hf://org")
    assert code == 4 and "has other bytes as tiny-2bit 1.1.0" in err


def test_commands_on_a_hub(here, hub, as_json, kvq, tmp_path):
    where = f"hf://org/{NAME}"
    for version in ("1.0.0", "1.1.0"):
        as_json("copy", f"{NAME}@{version}", "hf://org")
    assert as_json("diff", f"{where}@1.0.0", f"{NAME}@1.0.0") == []
    assert {row["part"] for row in as_json("diff", f"{where}@1.0.0", f"{where}@1.1.0")} == {
        "evaluation",
        "size",
        "provenance",
    }
    (row,) = as_json("list", "--registry", "hf://org")
    assert (row["name"], row["newest"], row["versions"], row["recipe"]) == (NAME, "1.1.0", 2, "tiny")
    assert as_json("promote", f"{where}@1.0.0")["before"] is None
    assert as_json("promote", f"{where}@1.1.0", "--expect", "1.0.0")["before"] == "1.0.0"
    code, _, err = kvq("promote", f"{where}@1.0.0", "--expect", "1.0.0")
    assert code == 4 and "somebody moved it" in err
    assert as_json("rollback", where)["version"] == "1.0.0"
    assert as_json("yank", f"{where}@1.1.0", "--reason", "wrong corpus")["yanked"] == "wrong corpus"
    changes = [row["change"] for row in as_json("history", where)]
    assert changes == ["publish", "publish", "promote", "promote", "rollback", "yank"]
    lock, out = tmp_path / "kvq.lock", tmp_path / "out"
    pulled = as_json("pull", f"{where}@production", "-o", out, "--lock", lock)
    assert (out / "kvq.safetensors").read_bytes() == tiny_artifact.data(0)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "error.png", "kvq.safetensors"]
    assert json.loads(lock.read_text())["commit"] == pulled["commit"] == hub.repos[f"org/{NAME}"].branches["main"]
    assert {row["result"] for row in as_json("verify", f"{where}@production", "--lock", lock)} == {"ok"}
    assert as_json("gc", "--registry", "hf://org", "--grace", "0s") == []
    assert as_json("doctor", "--registry", "hf://org") == []
    assert kvq("show", "hf://org/other")[0] == 3


def test_a_copy_has_all_versions_and_yanks(here, hub, as_json, kvq, tmp_path):
    here.yank(NAME, "1.0.0", "bad")
    planned = as_json("copy", NAME, "hf://org", "--dry-run")
    assert {row["result"] for row in planned} == {"would be published"} and not hub.repos
    as_json("copy", NAME, "hf://org")
    there, back = resolve.open_registry("hf://org"), f"file://{tmp_path}/copy"
    as_json("copy", f"hf://org/{NAME}", back)
    bytes_of = {v.version: (v.sha256, v.yanked) for v in here.state(NAME).versions.values()}
    for other in (there, resolve.open_registry(back)):
        assert {v.version: (v.sha256, v.yanked) for v in other.state(NAME).versions.values()} == bytes_of
    card = resolve.open_registry(back).attachments(NAME, resolve.open_registry(back).state(NAME).versions["1.0.0"])
    assert b'from_pretrained("tiny-2bit@1.0.0"' in card["README.md"]
    commits = len(hub.repos[f"org/{NAME}"].commits)
    for words in ((f"hf://org/{NAME}", back), (NAME, "hf://org")):
        assert {row["result"] for row in as_json("copy", *words)} == {"was there already"}
    assert len(hub.repos[f"org/{NAME}"].commits) == commits


def test_a_copy_that_was_cut_off_goes_on(here, hub, kvq):
    hub.faults.add("POST .*/commit/", "status", times=1000, status=500)
    code, _, err = kvq("copy", NAME, "hf://org")
    assert code == 1 and "no answer from the Hub" in err
    hub.faults = type(hub.faults)()
    assert kvq("copy", NAME, "hf://org")[0] == 0
    assert list(resolve.open_registry("hf://org").state(NAME).versions) == ["1.0.0", "1.1.0"]


@pytest.mark.slow
def test_calibrate_pushes_and_the_snippet_of_the_card_works(hub, monkeypatch, tmp_path, capsys):
    from kvq_calib.cli import calibrate

    folder = tmp_path / "tiny-model"
    folder.mkdir()
    tiny.save(folder, "llama", layers=2)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# tiny\n")
    given = ["--model", str(folder), "--corpus", str(tiny.text(folder)), "--samples", "4", "--seq-len", "128", "--json"]
    given += ["--also", "none"]
    assert calibrate.main([*given, "--push", "hf://elsewhere"]) == 1  # before the work
    assert "not a member of it" in capsys.readouterr().err and not hub.repos
    assert calibrate.main([*given, "--push", "hf://org"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    here, there = row["published"]
    assert row["artifact"] == here["reference"] == "tiny-model-aqua-2bit@1.0.0" and here["new"] and there["new"]
    assert there == {
        "registry": "hf://org",
        "reference": "hf://org/tiny-model-aqua-2bit@1.0.0",
        "path": None,
        "new": True,
        "yanked": None,
    }
    assert resolve.resolve("tiny-model-aqua-2bit").sha256 == row["sha256"]
    assert calibrate.main([*given, "--push", "hf://org"]) == 0
    (again,) = json.loads(capsys.readouterr().out)
    assert [place.pop("new") for place in (*again["published"], here, there)] == [False, False, True, True]
    assert again == row
    clear(monkeypatch, tmp_path)
    repo = hub.repos["org/tiny-model-aqua-2bit"]
    text = hub.content(repo, repo.at("main").tree["README.md"]).decode()
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0"
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert 'KVQCache.from_pretrained("hf://org/tiny-model-aqua-2bit", model=model)' in code
    monkeypatch.chdir(tmp_path)  # the card names the model's folder
    exec(code.replace("max_new_tokens=64", "max_new_tokens=4"), {})
    assert "aqua-2bit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cache_comes_from_a_hub_by_alias(hub, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from kvq_calib.cli import calibrate
    from kvq_runtime import KVQCache

    folder = tmp_path / "tiny-model"
    folder.mkdir()
    tiny.save(folder, "llama", layers=2)
    given = ["--model", str(folder), "--corpus", str(tiny.text(folder)), "--samples", "4", "--seq-len", "128"]
    given += ["--also", "none"]
    assert calibrate.main([*given, "--registry", "hf://org", "--name", "small"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(NotFound, match="no alias production"):
        KVQCache.from_pretrained("hf://org/small@production", model=model)
    resolve.open_registry("hf://org").promote("small", "1.0.0")
    cache = KVQCache.from_pretrained("hf://org/small@production", model=model)
    assert cache.blocks.recipe.name == "aqua-2bit"
    lock = str(tmp_path / "kvq.lock")
    assert cli.main(["pull", "hf://org/small@production", "-o", str(tmp_path / "out"), "--lock", lock]) == 0
    before = len(asked(hub))
    KVQCache.from_pretrained("hf://org/small@production", model=model, lock=lock)
    assert len(asked(hub)) == before
    text = ["--corpus", str(folder / "corpus.txt"), "--windows", "1", "--length", "256", "--quiet", "--also", "none"]
    assert cli.main(["eval", "hf://org/small@production", "--model", str(folder), *text]) == 0
    kept = resolve.open_registry("hf://org")
    records = kept.evaluations(kept.state("small").versions["1.0.0"].sha256, "small")
    assert [record["protocol"]["length"] for record in records].count(256) == 1  # beside that of the calibration itself
    assert {record["result"]["recipe"] for record in records} == {"aqua-2bit"}
