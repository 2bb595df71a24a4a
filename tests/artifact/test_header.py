"""Every damage of an artifact that its digests let through is refused by its own check, before safetensors sees it."""

import json
from dataclasses import replace

import pytest
import tiny_artifact as tiny
import torch
from tiny_artifact import refused

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError

HEADERS = {
    "not JSON": (b"{" + b"x" * 20 + b"}", "invalid JSON"),
    "no metadata": (b"{}", "__metadata__: expected an object"),
    "key twice": (b'{"__metadata__":{"kvq":"{}"},"__metadata__":{"kvq":"{}"}}', "invalid JSON.*appears twice"),
    "too deep": (b'{"__metadata__":' + b"[" * 100 + b"]" * 100 + b"}", "invalid JSON.*nested 101 levels deep"),
    "NaN": (b'{"__metadata__":{"kvq":NaN}}', "invalid JSON.*not a finite number"),
}


@pytest.mark.parametrize("text, message", HEADERS.values(), ids=HEADERS.keys())
def test_a_strange_header_is_refused(text, message, tmp_path):
    refused(
        tiny.with_header(text), f"header: .*{message}" if "metadata" not in message else f"header: {message}", tmp_path
    )


def entry(dtype="U8", shape=(4,), offsets=(0, 4)) -> str:
    return json.dumps({"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)})


ENTRIES = {
    "climbs out": (("../../x", entry()), "tensor name '../../x'"),
    "unknown dtype": (("layers.0.key.a.b", entry("F64", (1,), (0, 8))), "dtype 'F64'"),
    "negative": (("layers.0.key.a.b", entry(shape=(-4,))), "expected whole numbers"),
    "too short": (("layers.0.key.a.b", entry(shape=(5,))), "its offsets hold 4"),
    "gap": (("layers.0.key.a.b", entry(offsets=(1, 5))), "begins at 1, but the data before it ends at 0"),
    "beyond the end": (("layers.0.key.a.b", entry(shape=(9,), offsets=(0, 9))), "the tensors end at 9, the data at 8"),
    "unclaimed bytes": (("layers.0.key.a.b", entry()), "the tensors end at 4, the data at 8"),
}


@pytest.mark.parametrize("given, message", ENTRIES.values(), ids=ENTRIES.keys())
def test_a_strange_tensor_is_refused(given, message, tmp_path):
    name, value = given
    text = f'{{"__metadata__":{{"kvq":"{{}}"}},"{name}":{value}}}'.encode()
    refused(tiny.with_header(text, bytes(8)), f"header: .*{message}", tmp_path)


def test_overlapping_tensors_are_refused(tmp_path):
    two = f'"layers.0.key.a.b":{entry()},"layers.0.key.a.c":{entry(offsets=(2, 6))}'
    text = f'{{"__metadata__":{{"kvq":"{{}}"}},{two}}}'.encode()
    refused(tiny.with_header(text, bytes(6)), "header: layers.0.key.a.c begins at 2", tmp_path)


NAN = torch.full((16, 16), float("nan"), dtype=torch.bfloat16)
STAMP = tiny.tiny().fingerprint.to_json()
RECIPE = tiny.recipe().to_json()
RESEALED = {
    "foreign tensor": (
        {"tensors": {"layers.0.key.predict.spy": torch.zeros(2)}},
        r"tensors: foreign \['layers.0.key.pr",
    ),
    "missing tensor": ({"tensors": {tiny.WEIGHT: None}}, rf"tensors: foreign \[\], missing \['{tiny.WEIGHT}'\]"),
    "wrong shape": (
        {"tensors": {tiny.WEIGHT: torch.zeros(8, 32, dtype=torch.bfloat16)}},
        rf"tensors: {tiny.WEIGHT} is bfloat16 \[8, 32\], expected bfloat16 \[16, 16\]",
    ),
    "NaN": ({"tensors": {tiny.WEIGHT: NAN}}, rf"finite: {tiny.WEIGHT} has NaN, infinity, or more"),
    "newer schema": ({"schema": 2}, "schema: the file has 2, this version reads 1"),
    "fit is no object": ({"fit": []}, "schema: provenance and fit must be objects"),
    "recipe of unknown stage": (
        {"recipe": RECIPE | {"key": {"quantize": {"kind": "os.system"}}}},
        "recipe: quantize=.*os.system.*use an object with a kind of",
    ),
    "recipe with unknown key": ({"recipe": RECIPE | {"module": "os"}}, r"recipe: recipe: unknown keys \['module'\]"),
    "recipe beyond the model": (
        {"recipe": RECIPE | {"layers": {"9": RECIPE["layers"]["0"]}}},
        r"recipe: .*settings for layers \[9\]",
    ),
    "a billion layers": (
        {"fingerprint": STAMP | {"geometry": {"layers": 10**9, "kv_heads": 2, "head_size": 8}}},
        "fingerprint: .*every layer needs 2 probes",
    ),
    "a giant head": (
        {"fingerprint": STAMP | {"geometry": {"layers": 2, "kv_heads": 2, "head_size": 10**12}}},
        "fingerprint: ",
    ),
    "no layers": (
        {"fingerprint": STAMP | {"geometry": {"layers": 0, "kv_heads": 2, "head_size": 8}}},
        "fingerprint: layers=0",
    ),
}


@pytest.mark.parametrize("change, message", RESEALED.values(), ids=RESEALED.keys())
def test_each_check_refuses_what_the_digests_let_through(change, message, tmp_path):
    refused(tiny.resealed(**change), message, tmp_path)


def test_content_is_checked_when_metadata_change():
    about, _, _ = tiny.parts(tiny.data())
    fitted = tiny.tiny()
    tensors = {**fitted.tensors, **fitted.fingerprint.probes}
    forged = artifact.seal(tensors, {**about, "provenance": {}})
    stated = forged.replace(tiny.parts(forged)[0]["content"].encode(), about["content"].encode())
    with pytest.raises(ArtifactError, match="^content: "):
        artifact.from_bytes(stated)


def test_what_could_not_be_loaded_is_not_written(tmp_path):
    fitted = tiny.tiny()
    with pytest.raises(ArtifactError, match="^finite: "):
        artifact.save(replace(fitted, tensors={**fitted.tensors, tiny.WEIGHT: NAN}), tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="JSON compliant"):
        artifact.to_bytes(replace(fitted, fit={"error": float("nan")}))
    assert not list(tmp_path.iterdir())


def test_nothing_of_a_damaged_file_reaches_safetensors(monkeypatch):
    damaged = [tiny.resealed(**change) for change, message in RESEALED.values() if not message.startswith("finite")]
    reached = []
    monkeypatch.setattr(artifact.safetensors.torch, "load", lambda data: reached.append(data))
    for data in damaged:
        with pytest.raises(ArtifactError):
            artifact.from_bytes(data)
    assert len(damaged) > 10 and not reached
