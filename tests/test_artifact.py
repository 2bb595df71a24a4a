"""An artifact is its bytes: the same content gives the same file, and every damage is refused by its own check."""

import json
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

from kvq_runtime import artifact, codec, files, fingerprint, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.fingerprint import Fingerprint
from kvq_runtime.geometry import Geometry

ROOT = Path(__file__).parents[1]


def refused(given: bytes, message: str, folder: Path) -> None:
    """The bytes are refused with this message: as they are, and from a file whose digest and size are as expected."""
    path = folder / "kvq.safetensors"
    path.write_bytes(given)
    with pytest.raises(ArtifactError, match=f"^{message}"):
        artifact.from_bytes(given)
    with pytest.raises(ArtifactError, match=f"{path}: {message}"):
        artifact.load(path, sha256(given).hexdigest(), len(given))


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
    assert len(codec.build(loaded.recipe, loaded.fingerprint.geometry, loaded.tensors)) == 2


def test_every_process_writes_the_same_bytes():
    body = "import tiny_artifact, hashlib; print(hashlib.sha256(tiny_artifact.data()).hexdigest())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
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


def test_a_flipped_bit_of_data_is_named_by_digest(tmp_path):
    good = tiny.data()
    mutant = good[:-1] + bytes([good[-1] ^ 1])
    refused(mutant, "content: the file holds", tmp_path)
    with pytest.raises(ArtifactError, match="sha256: the file has"):
        artifact.from_bytes(mutant, sha256(good).hexdigest())


def test_a_header_of_a_gigabyte_is_refused_unread(tmp_path):
    path = tmp_path / "kvq.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)  # a sparse file: whoever read the header would read a gigabyte
    with pytest.raises(ArtifactError, match=rf"header: {1 << 30} bytes long; at most {tiny.HEADER_LIMIT} are allowed"):
        artifact.load(path)
    with pytest.raises(ArtifactError, match="^header: .* bytes long; at most"):
        artifact.to_bytes(replace(tiny.tiny(), fit={"note": "x" * tiny.HEADER_LIMIT}))


HEADERS = {
    "not JSON": (b"{" + b"x" * 20 + b"}", "not the JSON"),
    "a list": (b"[]", "not a JSON object"),
    "padded before": (b" {}", "not a JSON object"),
    "no metadata": (b"{}", "__metadata__: an object is meant"),
    "other metadata": (b'{"__metadata__":{"kvq":"{}","x":"y"}}', r"__metadata__: unknown keys \['x'\]"),
    "key twice": (b'{"__metadata__":{"kvq":"{}"},"__metadata__":{"kvq":"{}"}}', "not the JSON.*is there twice"),
    "too deep": (b'{"__metadata__":' + b"[" * 100 + b"]" * 100 + b"}", "not the JSON.*nested 101 deep"),
    "NaN": (b'{"__metadata__":{"kvq":NaN}}', "not the JSON.*not a finite number"),
    "infinite": (b'{"__metadata__":{"kvq":1e999}}', "not the JSON.*not a finite number"),
    "not UTF-8": (b'{"\xff":1}', "not the JSON"),
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
    "absolute": (("/etc/passwd", entry()), "tensor name '/etc/passwd'"),
    "no place": (("weight", entry()), "tensor name 'weight'"),
    "unknown dtype": (("layers.0.key.a.b", entry("F64", (1,), (0, 8))), "dtype 'F64'"),
    "negative": (("layers.0.key.a.b", entry(shape=(-4,))), "whole numbers are meant"),
    "a float": (("layers.0.key.a.b", entry(shape=(4.0,))), "whole numbers are meant"),
    "true": (("layers.0.key.a.b", entry(shape=(True,), offsets=(0, 1))), "whole numbers are meant"),
    "overflow": (("layers.0.key.a.b", entry(shape=(1 << 32, 1 << 32))), "its offsets hold 4"),
    "too short": (("layers.0.key.a.b", entry(shape=(5,))), "its offsets hold 4"),
    "gap": (("layers.0.key.a.b", entry(offsets=(1, 5))), "begins at 1, but the data before it end at 0"),
    "backwards": (("layers.0.key.a.b", entry(offsets=(4, 0))), "its offsets hold -4"),
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
    "foreign layer": ({"tensors": {"layers.7.key.predict.mean": torch.zeros(16)}}, r"tensors: foreign \['layers.7.key"),
    "missing tensor": ({"tensors": {tiny.WEIGHT: None}}, rf"tensors: foreign \[\], missing \['{tiny.WEIGHT}'\]"),
    "wrong shape": (
        {"tensors": {tiny.WEIGHT: torch.zeros(8, 32, dtype=torch.bfloat16)}},
        rf"tensors: {tiny.WEIGHT} is bfloat16 \[8, 32\]; bfloat16 \[16, 16\] is expected",
    ),
    "wrong dtype": (
        {"tensors": {tiny.WEIGHT: torch.zeros(16, 16)}},
        rf"tensors: {tiny.WEIGHT} is float32 \[16, 16\]; b",
    ),
    "NaN": ({"tensors": {tiny.WEIGHT: NAN}}, rf"finite: {tiny.WEIGHT} holds NaN or infinity"),
    "infinity": ({"tensors": {tiny.WEIGHT: NAN.nan_to_num(float("inf"))}}, rf"finite: {tiny.WEIGHT} holds"),
    "NaN in a probe": (
        {"tensors": {"layers.0.key.fingerprint.probe": torch.full((8, 8), float("nan"))}},
        "finite: layers.0.key.fingerprint.probe holds",
    ),
    "newer schema": ({"schema": 2}, "schema: the file has 2, this kvq reads 1"),
    "no schema": ({"schema": None}, "schema: the file has None"),
    "true is no schema": ({"schema": True}, "schema: the file has True"),
    "unknown key": ({"url": "https://example.org"}, r"schema: kvq: unknown keys \['url'\]"),
    "fit is no object": ({"fit": []}, "schema: provenance and fit must be objects"),
    "recipe of unknown stage": (
        {"recipe": RECIPE | {"key": {"quantize": {"kind": "os.system"}}}},
        "recipe: quantize=.*os.system.*use an object with a kind of",
    ),
    "recipe with unknown key": ({"recipe": RECIPE | {"module": "os"}}, r"recipe: recipe: unknown keys \['module'\]"),
    "recipe that cannot be": ({"recipe": RECIPE | {"position": "middle"}}, "recipe: .*position='middle'"),
    "recipe beyond the model": (
        {"recipe": RECIPE | {"layers": {"9": RECIPE["layers"]["0"]}}},
        r"recipe: .*settings for layers \[9\]",
    ),
    "recipe is no object": ({"recipe": "aqua-2bit"}, "recipe: .*an object is meant"),
    "a billion layers": (
        {"fingerprint": STAMP | {"geometry": {"layers": 10**9, "kv_heads": 2, "head_size": 8}}},
        "fingerprint: .*every layer has 2 probes",
    ),
    "a giant head": (
        {"fingerprint": STAMP | {"geometry": {"layers": 2, "kv_heads": 2, "head_size": 10**12}}},
        "fingerprint: ",
    ),
    "no layers": (
        {"fingerprint": STAMP | {"geometry": {"layers": 0, "kv_heads": 2, "head_size": 8}}},
        "fingerprint: layers=0",
    ),
    "no fingerprint": ({"fingerprint": {}}, "fingerprint: unknown keys"),
}


@pytest.mark.parametrize("change, message", RESEALED.values(), ids=RESEALED.keys())
def test_each_check_refuses_what_the_digests_let_through(change, message, tmp_path):
    refused(tiny.resealed(**change), message, tmp_path)


def test_the_resealed_file_itself_is_all_right():
    assert tiny.resealed() == tiny.data()


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


def test_a_file_is_opened_once(tmp_path, monkeypatch):
    path = tmp_path / "kvq.safetensors"
    digest = artifact.save(tiny.tiny(), path)
    opened, real = [], os.open
    monkeypatch.setattr(files.os, "open", lambda *given: opened.append(given[0]) or real(*given))
    artifact.load(path, digest)
    assert opened == [path]


def test_nothing_of_a_damaged_file_reaches_safetensors(monkeypatch):
    damaged = [tiny.resealed(**change) for change, message in RESEALED.values() if not message.startswith("finite")]
    reached = []
    monkeypatch.setattr(artifact.safetensors.torch, "load", lambda data: reached.append(data))
    for data in damaged:
        with pytest.raises(ArtifactError):
            artifact.from_bytes(data)
    assert len(damaged) > 10 and not reached


CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "rope_theta": 1000000,
}


def weights(seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {(i, n): torch.randn(16, 32, generator=generator) * 0.02 for i in (0, 1) for n in ("k_proj", "v_proj")}


def stamp(dtype=torch.float32, seed: int = 0, **config) -> Fingerprint:
    own = weights(seed)
    return fingerprint.from_config({**CONFIG, **config}, lambda layer, name: own[layer, name].to(dtype))


def test_a_fingerprint_reads_old_and_new_configurations():
    old = stamp()
    new = stamp(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=8)
    assert old.to_json() == new.to_json()
    assert old.geometry == Geometry(2, 2, 8)
    scaled = stamp(rope_scaling={"type": "linear", "factor": 4})
    assert scaled.rope == {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    assert stamp(model_type="qwen3").qk_norm and not old.qk_norm


def test_the_same_weights_pass_in_every_float_format():
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        for found in (torch.float32, torch.bfloat16, torch.float16):
            fingerprint.compare(stamp(stored), stamp(found))


def test_another_model_is_refused():
    with pytest.raises(ArtifactError, match=r"geometry is .*'layers': 3.* in the model, .*'layers': 2"):
        own = weights()
        fingerprint.compare(
            stamp(), fingerprint.from_config({**CONFIG, "num_hidden_layers": 3}, lambda i, n: own[i % 2, n])
        )
    with pytest.raises(ArtifactError, match="rope is .*500000.0.* in the model, .*1000000.0.* in the artifact"):
        fingerprint.compare(stamp(), stamp(rope_theta=500000))
    with pytest.raises(ArtifactError, match="qk_norm is True in the model, False in the artifact"):
        fingerprint.compare(stamp(), stamp(model_type="qwen3"))
    with pytest.raises(ArtifactError, match="weights of layer . .* differ by 1.*allow_other_weights=True"):
        fingerprint.compare(stamp(), stamp(seed=1))
    with pytest.warns(UserWarning, match="weights of layer"):
        fingerprint.compare(stamp(), stamp(seed=1), allow_other_weights=True)


def test_a_slight_fine_tune_is_refused_and_quantized_weights_warn():
    own = weights()
    near = {key: w + 0.05 * w.norm() / w.numel() ** 0.5 * torch.randn_like(w) for key, w in own.items()}
    tuned = fingerprint.from_config(CONFIG, lambda i, n: near[i, n])
    with pytest.raises(ArtifactError, match="weights of layer"):
        fingerprint.compare(stamp(), tuned)
    quantized = fingerprint.from_config({**CONFIG, "quantization_config": {"bits": 4}}, lambda i, n: near[i, n])
    with pytest.warns(UserWarning, match="errors may be larger"):
        fingerprint.compare(stamp(), quantized)
    with pytest.raises(ArtifactError, match="weights of layer"):  # quantized, and of another model
        fingerprint.compare(stamp(seed=1), quantized)
    packed = fingerprint.from_config(CONFIG, lambda i, n: torch.zeros(4, dtype=torch.uint8))
    assert not packed.probes and packed.quantized
    with pytest.warns(UserWarning, match="packed weights cannot be compared"):
        fingerprint.compare(stamp(), packed)


def test_a_probe_samples_the_whole_matrix():
    rows, columns = torch.arange(24.0)[:, None], torch.arange(40.0) / 100
    found = fingerprint.probe(rows + columns)
    assert torch.equal(found, torch.arange(0, 24.0, 3)[:, None] + torch.arange(0, 40.0, 5) / 100)
    with pytest.raises(ValueError, match="a probe needs a float matrix"):
        fingerprint.probe(torch.zeros(3))


def test_canonical_json_is_one_text():
    value = {"b": [1, 2.5, None, True], "a": {"é": "\n"}}
    text = strict_json.dumps(value)
    assert text == '{"a":{"\\u00e9":"\\n"},"b":[1,2.5,null,true]}'
    assert strict_json.loads(text, "x") == value
    assert strict_json.loads('{"a":"[[[[[[[["}', "x", depth=1) == {"a": "[[[[[[[["}  # brackets in text have no depth
