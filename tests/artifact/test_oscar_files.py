"""OSCAR's rotation files become artifacts and files again; what is none of them is refused in a sentence."""

import io
import pickle
import random
import time
import warnings
import zipfile

import mutate
import numpy as np
import pytest
import torch

from kvq_runtime.artifact import artifact, fingerprint, oscar_files
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.codec.shared import build
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import preset

GEOMETRY = Geometry(layers=2, kv_heads=3, head_size=8)


def orthogonal(seed: int, *shape: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()).Q.float()


def state(*shape: int, seed: int = 0) -> dict:
    """What the authors' script saves: rotation, eigenvalues and number of each layer."""
    layers = {
        number: {"layer_id": number, "rotation": orthogonal(seed + number, *shape), "eigenvalues": torch.rand(8)}
        for number in range(2)
    }
    return {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer", "layers": layers}


def saved(thing) -> bytes:
    out = io.BytesIO()
    torch.save(thing, out)
    return out.getvalue()


def model() -> Fingerprint:
    probes = {name: torch.ones(*spec[0], dtype=spec[1]) for name, spec in fingerprint.specs(GEOMETRY).items()}
    return Fingerprint(GEOMETRY, {"rope_type": "default", "rope_theta": 10000.0}, False, probes)


def imported(tmp_path, keys: dict, values: dict, recipe: str = "oscar-2bit") -> artifact.Artifact:
    paths = tmp_path / "k.pt", tmp_path / "v.pt"
    for path, thing in zip(paths, (keys, values), strict=True):
        path.write_bytes(saved(thing))
    return oscar_files.to_artifact(paths, preset(recipe), model(), "a-model")


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)], ids=["by layer", "by head"])
def test_a_file_that_is_imported_and_exported_is_the_same(tmp_path, shape):
    keys, values = state(*shape), state(*shape, seed=5)
    made = artifact.from_bytes(artifact.to_bytes(imported(tmp_path, keys, values)))
    found = oscar_files.from_artifact(made)
    assert list(found) == ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"]
    for data, given in zip(found.values(), (keys, values), strict=True):
        again = torch.load(io.BytesIO(data), weights_only=True)
        assert again["format_version"] == (1 if len(shape) == 2 else 2)
        assert again["layers"].keys() == given["layers"].keys()
        for number, entry in given["layers"].items():
            assert torch.equal(again["layers"][number]["rotation"], entry["rotation"])
    (tmp_path / "again").mkdir()
    for name, data in zip(("k.pt", "v.pt"), found.values(), strict=True):
        (tmp_path / "again" / name).write_bytes(data)
    paths = tmp_path / "again" / "k.pt", tmp_path / "again" / "v.pt"
    once_more = oscar_files.to_artifact(paths, preset("oscar-2bit"), model(), "a-model")
    assert all(torch.equal(once_more.tensors[name], tensor) for name, tensor in made.tensors.items())


def test_the_file_is_what_the_codec_rotates_with(tmp_path):
    """x R of each head, in numpy, R as the file has it; layers may be named by text."""
    keys = state(3, 8, 8)
    keys["layers"] = {str(number): entry for number, entry in keys["layers"].items()}
    made = imported(tmp_path, keys, state(8, 8))
    codec = build(made.recipe, GEOMETRY, made.tensors)[1][0]
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    rotation = keys["layers"]["1"]["rotation"].numpy()
    expected = np.einsum("thd,hde->the", x.numpy().reshape(4, 3, 8), rotation)
    assert np.allclose(codec.rotated(x).numpy(), expected.reshape(4, 24), atol=1e-6)


class Harmful:
    def __reduce__(self):
        return print, ("run",)


def changed(**changes) -> dict:
    given = state(8, 8)
    given["layers"][1] |= changes
    return given


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no file of torch.save"),
        (b"PK\x03\x04 cut", "no file of tensors"),
        (pickle.dumps({"layers": {}}), "no file of torch.save"),
        (pickle.dumps(Harmful()), "no file of torch.save"),
        (saved(Harmful()), "no file of tensors"),
        (saved([1, 2]), 'a dictionary with "layers"'),
        (saved({"layers": {0: state(8, 8)["layers"][0]}}), r"missing \['1'\]"),
        (saved({"layers": {**state(8, 8)["layers"], 2: {}}}), r"too many \['2'\]"),
        (
            saved(changed(rotation=torch.eye(4))),
            r"layer 1: a rotation \[4, 4\]; the model takes \[8, 8\] or \[3, 8, 8\]",
        ),
        (saved(changed(rotation=orthogonal(1, 2, 8, 8))), r"a rotation \[2, 8, 8\]"),
        (saved(changed(rotation=torch.eye(8).long())), "floating-point"),
        (saved(changed(rotation=torch.eye(8).to_sparse())), "floating-point"),
        (saved(changed(rotation=torch.ones(8, 8))), "not orthogonal"),
        (saved(changed(rotation=torch.full((8, 8), float("nan")))), "not orthogonal"),
    ],
    ids=(
        "empty", "cut", "pickle", "harmful-pickle", "harmful", "list", "missing", "extra", "size", "heads", "integers",
        "sparse", "ones", "nan",
    ),
)  # fmt: skip
def test_what_is_no_rotation_file_is_refused(data, message, capsys):
    with pytest.raises(ArtifactError, match=message) as refused:
        oscar_files.read(data, GEOMETRY, "k.pt")
    assert str(refused.value).startswith("k.pt") and "run\n" not in capsys.readouterr().out


def with_pickle(code: bytes) -> bytes:
    """A file with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(state(8, 8)))) as good, zipfile.ZipFile(out, "w") as made:
        for name in good.namelist():
            made.writestr(name, code if name.endswith("data.pkl") else good.read(name))
    return out.getvalue()


def laughing(depth: int) -> bytes:
    """A dictionary whose key is a tuple of three times the tuple before, so many deep: its hash takes 3^depth steps."""
    code = b"\x80\x02)q\x00"
    for number in range(1, depth + 1):
        code += (b"h" + bytes([number - 1])) * 3 + b"\x87q" + bytes([number])
    return code + b"}h" + bytes([depth]) + b"K\x01s."


def wide(width: int) -> bytes:
    """The same with three levels of tuples of `width` items."""
    code = b"\x80\x02)q\x00"
    for number in range(1, 4):
        code += b"(" + (b"h" + bytes([number - 1])) * width + b"tq" + bytes([number])
    return code + b"}h\x03K\x01s."


def packed(size: int) -> bytes:
    """An archive that unpacks to so many bytes of zeros."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x/data.pkl", b"}.")
        made.writestr("x/data/0", bytes(size))
    return out.getvalue()


def twice() -> bytes:
    """An archive with two pickles of one name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            made.writestr("x/data.pkl", b"}.")
    return out.getvalue()


HOSTILE = {
    "deep": with_pickle(laughing(60)), "wide": with_pickle(wide(2000)), "too large": packed(1 << 24),
    "twice": twice(), "no stack": with_pickle(b"\x80\x02s."), "meta": saved(changed(rotation=torch.eye(8).to("meta"))),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_rotation_file_is_refused_at_once(data):
    began = time.process_time()
    with pytest.raises(ArtifactError, match="^k.pt"):
        oscar_files.read(data, GEOMETRY, "k.pt")
    assert time.process_time() - began < 2


@pytest.mark.slow
def test_no_mutant_of_a_rotation_file_does_more_than_be_refused():
    """Bytes of the archive, or of its pickle, are changed; what is read nevertheless are rotations."""
    good = saved(state(8, 8))
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        code = archive.read(name)
    refused = 0
    for number in range(300):
        draw = random.Random(number)
        if number % 2:
            data = mutate.some_bytes(good, laughing(9), draw)
        else:
            data = with_pickle(mutate.some_bytes(code, laughing(9), draw))
        began = time.process_time()
        try:
            assert all(one.shape == (3, 8, 8) for one in oscar_files.read(data, GEOMETRY, "k.pt"))
        except ArtifactError as error:
            refused += 1
            assert str(error).startswith("k.pt"), number
        assert time.process_time() - began < 2, number
    assert 100 < refused < 300


def test_a_recipe_that_is_not_oscars_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use a recipe of oscar"):
        imported(tmp_path, state(8, 8), state(8, 8), "wush-2bit")
