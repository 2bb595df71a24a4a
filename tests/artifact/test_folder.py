"""An artifact as a folder and as a repository: it loads again with its digest, and what stands beside it is true."""

import re
from dataclasses import replace
from hashlib import sha256

import tiny_artifact as tiny
import yaml

from kvq_runtime import load_artifact, save_pretrained
from kvq_runtime.artifact import artifact, folder
from kvq_runtime.store.memory import Sizes


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


def test_what_is_saved_loads_again_with_the_same_digest(tmp_path):
    made = tiny.tiny(3)
    digest = save_pretrained(made, tmp_path / "new" / "folder")
    assert digest == sha256(tiny.data(3)).hexdigest()
    again = load_artifact(tmp_path / "new" / "folder")
    assert artifact.to_bytes(again) == tiny.data(3) and save_pretrained(again, tmp_path / "twice") == digest
    names = {"kvq.safetensors", "README.md"}
    for place in ("new/folder", "twice"):
        assert {path.name for path in (tmp_path / place).iterdir()} == names
    save_pretrained(tiny.tiny(4), str(tmp_path / "twice"))
    assert artifact.to_bytes(load_artifact(tmp_path / "twice")) == tiny.data(4)


def test_the_card_says_it_to_people_and_to_the_hub(tmp_path):
    made = tiny.tiny()
    save_pretrained(made, tmp_path)
    text = (tmp_path / "README.md").read_text()
    given, counted, sizes = front(text), folder.sizes(made), Sizes(made.recipe, made.fingerprint.geometry)
    for tokens in (4096, 32768, 131072):
        assert counted["bytes"][str(tokens)] == sizes.at(tokens).total_bytes
        assert counted["bytes_of_16bit"][str(tokens)] == 2 * 2 * 2 * 16 * tokens  # layers, roles, bytes, width
    assert counted["smaller_than_16bit_from"] == sizes.smaller_from() and 2 < counted["bits"] < 7
    assert (given["library_name"], given["pipeline_tag"], given["kvq"]) == ("kvq", "text-generation", counted)
    assert {"kvq", "tiny"} <= set(given["tags"])
    assert f"| smaller than 16 bit | from {counted['smaller_than_16bit_from']:,} tokens on |" in text
    assert "all bytes at 131,072 tokens" in text and f'from_pretrained("{tmp_path}"' in text


def test_what_a_file_says_is_no_markup_on_its_card(tmp_path):
    evil = "<script>alert(1)</script> [x](http://evil) | `a` \x1b[31m \u202e"
    made = replace(tiny.tiny(), recipe=replace(tiny.recipe(), summary=evil))
    made = replace(made, provenance=dict(made.provenance) | {"model": evil, "revision": evil, "corpus": evil})
    save_pretrained(made, tmp_path)
    text = (tmp_path / "README.md").read_text()
    body = text.split("---", 2)[2]
    assert "alert(1)" in body and "<script" not in body and "[x]" not in body.replace("\\[x\\]", "")
    assert "\x1b" not in text and "\u202e" not in text
    rows = [line for line in body.splitlines() if line.startswith("| ") and "alert" in line]
    assert len(rows) == 3 and all(len(re.split(r"(?<!\\)\|", row)) == 4 for row in rows)
