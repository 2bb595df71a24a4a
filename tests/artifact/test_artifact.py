"""An artifact is its bytes: the same content gives the same file, and a file whose bytes changed is refused."""

import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import tiny_artifact as tiny
import torch
from tiny_artifact import refused

from kvq_runtime.artifact import artifact
from kvq_runtime.codec import shared
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, NotFound

ROOT = Path(__file__).parents[2]


def test_a_file_gives_back_what_was_put_in(tmp_path):
    fitted = tiny.tiny()
    digest = artifact.save(fitted, tmp_path / "kvq.safetensors")
    data = (tmp_path / "kvq.safetensors").read_bytes()
    loaded = artifact.load(tmp_path / "kvq.safetensors", digest, len(data))
    assert sha256(data).hexdigest() == digest
    assert (loaded.recipe, loaded.provenance, loaded.fit) == (fitted.recipe, fitted.provenance, fitted.fit)
    assert loaded.fingerprint.to_json() == fitted.fingerprint.to_json()
    for mine, theirs in ((fitted.tensors, loaded.tensors), (fitted.fingerprint.probes, loaded.fingerprint.probes)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)
    assert artifact.to_bytes(loaded) == data
    assert len(shared.build(loaded.recipe, loaded.fingerprint.geometry, loaded.tensors)) == 2


@pytest.mark.slow
def test_every_process_writes_the_same_bytes():
    body = "import tiny_artifact, hashlib; print(hashlib.sha256(tiny_artifact.data()).hexdigest())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, env=environment, check=True)
        found.add(done.stdout.strip())
    fitted = tiny.tiny()
    turned = replace(
        fitted,
        tensors=dict(reversed(fitted.tensors.items())),
        provenance=dict(reversed(fitted.provenance.items())),
        fit=dict(reversed(fitted.fit.items())),
    )
    assert found == {sha256(artifact.to_bytes(turned)).hexdigest()}


def test_the_header_is_as_the_documentation_says():
    about, entries, body = tiny.parts(tiny.data())
    content = about.pop("content")
    described = json.dumps({"kvq": about, "tensors": entries}, sort_keys=True, separators=(",", ":"))
    assert content == sha256(described.encode() + body).hexdigest()
    assert set(about) == {"schema", "recipe", "fingerprint", "provenance", "fit"}


def test_every_truncated_file_is_refused(tmp_path):
    good = tiny.data()
    for length in (0, 4, 8, 100, len(good) // 2, len(good) - 1):
        refused(good[:length], "header: ", tmp_path)
    refused(good + b"\0", "header: the tensors end at", tmp_path)
    path = tmp_path / "kvq.safetensors"
    path.write_bytes(good)
    with pytest.raises(ArtifactError, match="size: the file has"):
        artifact.load(path, size=len(good) - 1)


def test_every_flipped_bit_is_refused_even_when_resealed():
    good = tiny.data()
    digest = sha256(good).hexdigest()
    start = 8 + int.from_bytes(good[:8], "little")
    places = [*range(0, 8), *range(8, start, 37), start - 1, *range(start, len(good), 401), len(good) - 1]
    for place in places:
        mutant = bytearray(good)
        mutant[place] ^= 1 << (place % 8)
        with pytest.raises(ArtifactError, match=r"^(header|schema|content): "):
            artifact.from_bytes(bytes(mutant))
        with pytest.raises(ArtifactError, match=r"^(header|sha256): "):
            artifact.from_bytes(bytes(mutant), digest)


def test_a_header_of_a_gigabyte_is_refused_unread(tmp_path):
    path = tmp_path / "kvq.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)  # a sparse file: whoever read the header would read a gigabyte
    with pytest.raises(
        ArtifactError,
        match=rf"header: {1 << 30} bytes long by its first 8, and at most {tiny.HEADER_LIMIT} are allowed",
    ):
        artifact.load(path)
    with pytest.raises(ArtifactError, match="^header: .* bytes long by its first 8, and at most"):
        artifact.to_bytes(replace(tiny.tiny(), fit={"note": "x" * tiny.HEADER_LIMIT}))


def test_only_regular_files_are_opened(tmp_path):
    path = tmp_path / "kvq.safetensors"
    artifact.save(tiny.tiny(), path)
    (tmp_path / "link.safetensors").symlink_to(path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ArtifactError, match="a symbolic link, which is not followed"):
        artifact.load(tmp_path / "link.safetensors")
    for name in ("pipe.safetensors", "folder.safetensors"):
        with pytest.raises(ArtifactError, match="not a regular file"):
            artifact.load(tmp_path / name)
    with pytest.raises(ArtifactError, match="not a regular file"):
        artifact.load("/dev/null")
    with pytest.raises(NotFound, match="no such file"):
        artifact.load(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("name", ["../x", "a\nb", "<script>", "x" * 500, "", "a b", "`a`"])
def test_a_recipe_has_a_name_that_can_be_shown(name, tmp_path):
    recipe = tiny.parts(tiny.data())[0]["recipe"] | {"name": name}
    tiny.refused(tiny.resealed(recipe=recipe), "recipe: name ", tmp_path)


@pytest.mark.parametrize("value", [3.4e38, -1e30, 2.0**21, math.inf, math.nan])
def test_a_number_that_would_overflow_is_refused(value, tmp_path):
    table = tiny.tiny().tensors[tiny.WEIGHT].clone()
    table[0, 0] = value
    tiny.refused(
        tiny.resealed({tiny.WEIGHT: table}), f"finite: {tiny.WEIGHT} has NaN, infinity, or more than", tmp_path
    )


def test_a_large_file_is_not_read_before_its_header_is_what_a_recipe_needs(tmp_path, monkeypatch):
    """A sparse terabyte with a header that covers it, and a good header that a file is longer than."""
    size, name = 1 << 40, "layers.0.key.predict.mean"
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    about, _, _ = tiny.parts(tiny.data())
    for kvq, message in ((b"{}", "schema: "), (strict_json.dumps(about).encode(), "fingerprint: ")):
        head = strict_json.dumps({"__metadata__": {"kvq": kvq.decode()}, name: entry}).encode()
        path = tmp_path / "kvq.safetensors"
        path.write_bytes(tiny.with_header(head))
        os.truncate(path, 8 + len(head) + size)
        with pytest.raises(ArtifactError, match=f"{path}: {message}"):
            artifact.load(path)
    small = tmp_path / "small.safetensors"
    small.write_bytes(tiny.data())
    monkeypatch.setattr(artifact, "UNASKED", 16)
    assert artifact.to_bytes(artifact.load(small)) == tiny.data()
