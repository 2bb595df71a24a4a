"""Faults that have little to do with kvq say what is at fault, and what to do."""

import errno
import gzip
import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_artifact as tiny

from kvq_calib.job import prepare
from kvq_calib.report import tables
from kvq_calib.text import documents, tokenizer
from kvq_runtime.artifact import recipe_text
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound, counted, spoken
from kvq_runtime.prefix.folder import parse_bytes
from kvq_runtime.recipe import preset
from kvq_runtime.registry import rating
from kvq_runtime.registry.hub import client
from kvq_runtime.registry.resolve import open_registry


def test_a_corpus_that_cannot_be_unpacked_is_named(tmp_path):
    path = tmp_path / "text.jsonl.gz"
    for content in (b"hello", gzip.compress(b'{"text": "abc"}\n' * 99)[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"corpus text\.jsonl\.gz cannot be unpacked .*download it again"):
            documents.local(path)
    path = path.with_suffix(".zst")
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"corpus text\.jsonl\.zst cannot be unpacked"):
        documents.local(path)


def test_a_folder_without_a_tokenizer_is_told_in_a_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"put the model's tokenizer\.json into that folder$") as raised:
        tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_folder_that_takes_no_file_is_named_before_a_run(tmp_path, monkeypatch):
    prepare._writable(tmp_path / "runs" / "one")
    asked = []
    monkeypatch.setattr(os, "access", lambda *given: asked.append(given))  # root may write anywhere but on such disks
    with pytest.raises(RuntimeError, match=rf"nothing can be written in {tmp_path}; .*--run DIR, or \$KVQ_HOME"):
        prepare._writable(tmp_path / "runs" / "one")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def test_a_run_has_no_place_in_a_file_or_a_file_system_without_room(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=rf"{tmp_path}/file is a file; name another folder for the run: --run DIR"):
        prepare._writable(tmp_path / "file" / "run")
    with pytest.raises(RuntimeError, match=r"the file system of /proc has no room for files; .*--run DIR"):
        prepare._writable(Path("/proc/kvq/run"))


def test_bounds_are_refused_by_the_option_that_they_were_given_as():
    for given, option in (({"kl": 0.0}, "--max-kl 0.0"), ({"perplexity_ratio": -1.0}, "--max-perplexity-ratio -1.0")):
        with pytest.raises(ValueError, match=f"^{option}; use a number above 0"):
            rating.Bounds(**given)
    assert rating.Bounds(beyond=0.0).given == {"beyond": 0.0}  # no block at all
    with pytest.raises(ValueError, match="^--max-beyond -0.1: .*from 0 to 1"):
        rating.Bounds(beyond=-0.1)


def test_one_is_not_spoken_of_as_many():
    assert [counted(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    text = SimpleNamespace(source="book.txt", split=None, overlap=None)
    assert tables.about_text(SimpleNamespace(windows=1, length=512, text=text)).startswith("1 window of 512 tokens of")


def test_bits_by_layer_are_no_recipe_without_a_calibration():
    with pytest.raises(NotFound, match=r"no recipe 'auto-2\.1bit': .* kvq-calibrate --recipe auto --bits B"):
        preset("auto-2.1bit")


def test_a_size_is_refused_by_the_option_that_it_was_given_as():
    with pytest.raises(ValueError, match=r'^--memory \'lots\'; use a number of bytes, or text such as "20GB"'):
        parse_bytes("lots", "--memory ")


def test_messages_name_the_command_and_the_option_once(kvq, tmp_path):
    assert kvq("report")[2].startswith("kvq: nothing is named; give NAME")


def test_pull_writes_into_folders_only(kvq, tmp_path):
    open_registry().publish("tiny-2bit", tiny.data(0))
    (tmp_path / "file").touch()
    code, _, err = kvq("pull", "tiny-2bit@1.0.0", "-o", tmp_path / "file")
    assert code == 2 and f"-o {tmp_path / 'file'}: {tmp_path / 'file'} is a file; name a folder" in err
    inside = tmp_path / "new" / "kvq.lock"
    assert kvq("pull", "tiny-2bit@1.0.0", "-o", inside.parent, "--lock", inside)[0] == 0 and inside.is_file()


def test_what_a_file_says_beside_its_settings_agrees_with_them(kvq, tmp_path):
    stated = json.loads(kvq("recipes", "aqua-2bit", "--json")[1])
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(stated))
    assert recipe_text.read(str(path)) == preset("aqua-2bit")
    for field, value in {"bits": 7.0, "position": "post"}.items():
        path.write_text(json.dumps(stated | {field: value}))
        with pytest.raises(ValueError, match=f"{field} is .* change what is under settings"):
            recipe_text.read(str(path))


def test_a_path_that_the_system_refuses_is_told_in_words(kvq, tmp_path):
    open_registry().publish("tiny-2bit", tiny.data(0))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for words, code, said in [
        ("pull tiny-2bit -o {0}/out --lock {0}/folder", 2, r"--lock \S+/folder: a folder, and a file is wanted"),
        ("pull tiny-2bit -o {0}/out --lock {0}/none/x", 3, r"there is no folder \S+/none; make it"),
        ("pull tiny-2bit -o {0}/file/out", 2, r"-o \S+/file/out: \S+/file is a file; name a folder, which may be new"),
        ("report tiny-2bit --out {0}/folder", 2, r"--out \S+/folder: a folder, and a file is wanted"),
        ("report --registry --out {0}/file/pages", 2, r"\S+/file is a file; name a folder"),
        ("eval higgs-2bit --model demo --output {0}/none/x", 3, r"--output \S+: there is no folder"),
        ("copy tiny-2bit@1.0.0 {0}/file", 1, r"the registry \S+/file: \S+/file is a file; name a folder"),
        ("sign tiny-2bit@1.0.0 --key {0}/folder", 2, r"key \S+/folder: is a folder, and a file is wanted"),
        ("sign tiny-2bit@1.0.0 --key {0}/none", 3, r"key \S+/none: no such file"),
        ("show {0}/folder/", 3, r"folder without kvq\.safetensors"),
    ]:
        found, _, err = kvq(*words.format(tmp_path).split())
        assert found == code and re.search(said, err) and "Errno" not in err, (words, err)
    with pytest.raises(NotFound, match="no artifact x in .*; there is no such folder yet; kvq-calibrate publishes"):
        open_registry(tmp_path / "none").existing("x")
    with pytest.raises(ArtifactError, match="is a file; name a folder"):
        open_registry(tmp_path / "file").check_writable()


def test_what_a_version_is_wanted_for_is_said_with_an_example(kvq, tmp_path):
    open_registry().publish("tiny-2bit", tiny.data(0))
    for words, said in {
        "promote tiny-2bit": "as in kvq promote tiny-2bit@1.2.0 ...; kvq history tiny-2bit lists its versions",
        f"copy hf://org {tmp_path}/new": "use hf://org/name",
        f"copy file://{tmp_path} {tmp_path}/new": "of a folder; give it as the registry",
        "history tiny-2bit@1.0.0": "without a version, as in tiny-2bit",
    }.items():
        code, _, err = kvq(*words.split())
        assert code == 2 and re.search(said, err), err
    code, _, err = kvq("copy", "tiny-2bit@9.0.0", tmp_path / "new")
    assert code == 3


def test_a_text_that_is_named_as_an_artifact_is_another_kind_of_file(kvq, tmp_path):
    (tmp_path / "notes.safetensors").write_text("a text, which somebody has given this name")
    for command in ("show", "verify", "report"):
        code, _, err = kvq(command, tmp_path / "notes.safetensors")
        assert code == 1 and "it is damaged, or another kind of file" in err


def test_a_full_disk_is_told_by_its_folder(tmp_path, monkeypatch):
    def full(name: str) -> None:
        if name == "draft.written":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "fault_point", full)
    with pytest.raises(OSError) as found:
        files.save(tmp_path / "page.html", b"page")
    assert spoken(found.value) == f"{tmp_path}: {os.strerror(errno.ENOSPC)}"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_no_message_of_the_machine_is_a_number(number):
    assert spoken(OSError(number, os.strerror(number), "here")).startswith("here: ")
    assert spoken(OSError(number, os.strerror(number))) == os.strerror(number)
    assert spoken(OSError("of a library")) == "of a library"


@pytest.mark.parametrize("number, tries", [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, client.TRIES)])
def test_a_host_that_nobody_knows_is_asked_for_once(monkeypatch, number, tries):
    asked = []

    def ask():
        asked.append(1)
        raise ConnectionError("no") from socket.gaierror(number, "not known")

    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    said = "no host of this name" if tries == 1 else "after 5 tries"
    with pytest.raises(RuntimeError, match=said), client.translate_errors("org/name"):
        client.retry(ask)
    assert len(asked) == tries
