"""Versions are copied between a folder and a Hub, and commands do on hf:// what they do on file://."""

import json
import re

import pytest
import tiny
import tiny_artifact
import yaml
from hub_client import asked, clear
from local_store import NAME

from kvq_runtime.registry import resolve

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
"""


@pytest.fixture
def here(hub):
    """The user's own registry, with two versions, the first evaluated, the second yanked."""
    here = resolve.open_registry()
    first = here.publish(NAME, tiny_artifact.data(0), attachments={"README.md": CARD, "error.png": b"png"})
    here.publish(NAME, tiny_artifact.data(1, corpus="b" * 64))
    here.yank(NAME, "1.1.0", "bad")
    about = {"text": {"source": "wiki", "split": "test"}, "windows": 4, "length": 256}
    result = {"recipe": "tiny", "protocols": {"full": {"perplexity": 12.5, "relative": 0.01, "kl": 0.025}}}
    record = {"artifact": first.sha256, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": result}
    here.add_evaluation(record)
    return here


def test_a_copy_brings_everything_and_again_is_the_same(here, hub, as_json, kvq, tmp_path):
    first, _ = as_json("copy", NAME, "hf://org", "--private")
    assert first["result"] == "published"
    repo = hub.repos[f"org/{NAME}"]
    assert repo.private
    commits = len(repo.log)
    assert {row["result"] for row in as_json("copy", NAME, "hf://org")} == {"was there already"}
    assert len(repo.log) == commits
    back = (tmp_path / "back").as_uri()
    as_json("copy", f"hf://org/{NAME}", back)
    versions = {v.version: (v.sha256, v.yanked) for v in here.state(NAME).versions.values()}
    for url in ("hf://org", back):
        there = resolve.open_registry(url)
        assert {v.version: (v.sha256, v.yanked) for v in there.state(NAME).versions.values()} == versions
        assert there.evaluations(versions["1.0.0"][0], NAME) == here.evaluations(versions["1.0.0"][0])
    card = there.attachments(NAME, there.state(NAME).get("1.0.0"))["README.md"]
    assert b'from_pretrained("tiny-2bit@1.0.0"' in card
    assert kvq("copy", "other@1.0.0", "hf://org")[0] == 3
    resolve.open_registry("hf://org").publish(NAME, tiny_artifact.data(9), version="1.2.0")
    here.publish(NAME, tiny_artifact.data(8), version="1.2.0")
    code, _, error = kvq("copy", f"{NAME}@1.2.0", "hf://org")
    assert code == 4 and "1.2.0 is published with other bytes" in error


def test_a_card_is_adapted_to_where_it_is(here, hub, as_json):
    as_json("copy", f"{NAME}@1.0.0", "hf://org")
    text = hub.repos[f"org/{NAME}"].files["README.md"].decode()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "mit" and front["tags"] == ["kvq", "tiny"]
    assert f'KVQCache.from_pretrained("hf://org/{NAME}@1.0.0", model=model)' in text
    assert "![error](versions/1.0.0/error.png)" in text


def test_commands_on_a_hub(here, hub, as_json, kvq, tmp_path):
    where = f"hf://org/{NAME}"
    as_json("copy", f"{NAME}@1.0.0", "hf://org")
    resolve.open_registry("hf://org").publish(NAME, tiny_artifact.data(2))
    (row,) = as_json("list", "--registry", "hf://org")
    assert (row["name"], row["newest"], row["versions"], row["recipe"]) == (NAME, "1.0.1", 2, "tiny")
    assert as_json("promote", f"{where}@1.0.0")["before"] is None
    assert as_json("promote", f"{where}@1.0.1", "--expect", "1.0.0", "--force")["before"] == "1.0.0"
    code, _, error = kvq("promote", f"{where}@1.0.0", "--expect", "1.0.0")
    assert code == 4 and "somebody moved it" in error
    assert as_json("rollback", where)["version"] == "1.0.0"
    assert as_json("yank", f"{where}@1.0.1", "--reason", "wrong corpus")["yanked"] == "wrong corpus"
    changes = [row["change"] for row in as_json("history", where)]
    assert changes == ["publish", "publish", "promote", "promote", "rollback", "yank"]
    lock, out = tmp_path / "kvq.lock", tmp_path / "out"
    as_json("pull", f"{where}@production", "-o", out, "--lock", lock)
    assert (out / "kvq.safetensors").read_bytes() == tiny_artifact.data(0)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "error.png", "kvq.safetensors"]
    assert "lock" in as_json("verify", f"{where}@production", "--lock", lock)["passed"]


@pytest.mark.slow
def test_calibrate_pushes_and_the_snippet_of_the_card_works(hub, monkeypatch, tmp_path, capsys):
    from kvq_calib.cli import calibrate

    folder = tmp_path / "tiny-model"
    folder.mkdir()
    tiny.save(folder, "llama", layers=2)
    given = ["--model", str(folder), "--corpus", str(tiny.text(folder)), "--samples", "4", "--seq-len", "128", "--json"]
    assert calibrate.main([*given, "--push", "hf://elsewhere"]) == 1  # before the work
    assert "not a member of it" in capsys.readouterr().err and not hub.repos
    assert calibrate.main([*given, "--push", "hf://org"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    here, there = row["published"]
    assert row["artifact"] == here["reference"] == "tiny-model-aqua-2bit@1.0.0" and here["new"] and there["new"]
    assert there["reference"] == "hf://org/tiny-model-aqua-2bit@1.0.0"
    assert calibrate.main([*given, "--push", "hf://org"]) == 0
    (again,) = json.loads(capsys.readouterr().out)
    assert [place["new"] for place in again["published"]] == [False, False]
    clear(monkeypatch, tmp_path)
    text = hub.repos["org/tiny-model-aqua-2bit"].files["README.md"].decode()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert 'KVQCache.from_pretrained("hf://org/tiny-model-aqua-2bit", model=model)' in code
    monkeypatch.chdir(tmp_path)  # the card names the model's folder
    exec(code.replace("max_new_tokens=64", "max_new_tokens=4"), {})
    assert "aqua-2bit" in capsys.readouterr().out and asked(hub)
