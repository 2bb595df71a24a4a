"""Read and write OSCAR's rotation files: a pickled dictionary, {"layers": {layer: {"rotation": tensor, ...}}}, by role.

A rotation is [D, D], one for all heads of a layer (`format_version` 1), or [H, D, D] (2). A file may be a
stranger's: it is read as tensors and plain containers alone, in time and memory that are bounded.

`torch.load(weights_only=True)` runs nothing that a pickle names. But it hashes keys of dictionaries, and a tuple of
three times the same tuple, 60 deep, takes 3^60 steps; and it unpacks as much as an archive holds. So the pickle's steps
are walked first, and the archive is packed again from what was read of it, so that torch reads no other.

Source: Zhou et al., 2026 (OSCAR), the authors' `compute_kv_rotation.py` and its loaders.
Differs: eigenvalues, which the authors' files hold beside a rotation and no loader reads, are not kept.
"""

import io
import pickle
import pickletools
import warnings
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.codec import codec
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.recipe import Recipe

TOLERANCE = 5e-3  # of RᵀR - 1, as the authors check what they write; files in bfloat16 keep it
OBJECTIVES = {"queries": "qqt_r_h_pbr", "attended": "sst_r_h_pbr", "output": "output_r_h_pbr"}
ZIP = b"PK\x03\x04"
PICKLE = 1 << 20  # bytes of the pickle, which holds no tensor's data
COST = 256  # steps that hashing one object of it may take
NAMES = {"key": "k_rotation_{}.pt", "value": "v_rotation_{}.pt"}


def to_artifact(paths: tuple[Path, Path], recipe: Recipe, fingerprint: Fingerprint, model: str) -> Artifact:
    """An artifact of a recipe with OSCAR's rotations of keys and of values.

    ArtifactError for a file that is none or suits another model, ValueError for a recipe that is not OSCAR's.
    """
    _check(recipe, fingerprint.geometry)
    tensors, digests = {}, {}
    for role, path in zip(ROLES, paths, strict=True):
        data = files.read(path, _largest(fingerprint.geometry))
        digests[role] = sha256(data).hexdigest()
        for layer, rotation_HDD in enumerate(read(data, fingerprint.geometry, str(path))):
            tensors[f"layers.{layer}.{role}.rotate.rotation"] = rotation_HDD
    provenance = {"model": model, "imported": {"format": "oscar", "sha256": digests}}
    return Artifact(recipe, fingerprint, tensors, provenance, {"layers": []})


def read(data: bytes, geometry: Geometry, name: str = "file") -> list[Tensor]:
    """The rotations of all layers, float32 [H, D, D] each, from the bytes of a file."""
    state = _unpickled(data, _largest(geometry), name)
    layers = state.get("layers") if isinstance(state, dict) else None
    if not isinstance(layers, dict):
        raise ArtifactError(f'{name}: a rotation file is a dictionary with "layers"; this is none')
    found = {str(number): entry for number, entry in layers.items()}
    wanted = {str(layer) for layer in range(geometry.layers)}
    if found.keys() != wanted:
        missing, beyond = sorted(wanted - found.keys(), key=int), sorted(found.keys() - wanted)
        raise ArtifactError(
            f"{name}: the model has layers 0 to {geometry.layers - 1}; missing {missing[:8]}, too many {beyond[:8]}"
        )
    return [_rotation(found[str(layer)], geometry, f"{name}, layer {layer}") for layer in range(geometry.layers)]


def _largest(geometry: Geometry) -> int:
    """Bytes that no rotation file of a model exceeds: a float64 and as much again for each element, and the rest."""
    return (16 * geometry.kv_heads * geometry.head_size**2 + (1 << 16)) * geometry.layers + 2 * PICKLE


def _rotation(entry: Any, geometry: Geometry, where: str) -> Tensor:
    rotation = entry.get("rotation") if isinstance(entry, dict) else None
    heads, size = geometry.kv_heads, geometry.head_size
    plain = torch.strided, "cpu"
    if not isinstance(rotation, Tensor) or (rotation.layout, rotation.device.type) != plain:
        raise ArtifactError(f'{where}: no "rotation" of floating-point numbers')
    if not rotation.is_floating_point():
        raise ArtifactError(f'{where}: no "rotation" of floating-point numbers')
    if tuple(rotation.shape) not in ((size, size), (heads, size, size)):
        raise ArtifactError(
            f"{where}: a rotation {list(rotation.shape)}; the model takes [{size}, {size}] or [{heads}, {size}, {size}]"
        )
    rotation_HDD = rotation.float().expand(heads, size, size).contiguous()
    error = float((rotation_HDD.double().mT @ rotation_HDD.double() - torch.eye(size)).abs().max())
    if not error <= TOLERANCE:
        raise ArtifactError(f"{where}: not orthogonal, |RᵀR - 1| is {error:.2g}; at most {TOLERANCE} is allowed")
    return rotation_HDD


def from_artifact(made: Artifact) -> dict[str, bytes]:
    """{name: the bytes of a rotation file}, of keys and of values; version 1 if all heads of each layer share one."""
    _check(made.recipe, made.fingerprint.geometry)
    found = {}
    for role in ROLES:
        rotations = [
            made.tensors[f"layers.{n}.{role}.rotate.rotation"] for n in range(made.fingerprint.geometry.layers)
        ]
        shared = all(torch.equal(one, one[:1].expand_as(one)) for one in rotations)
        rotate: Any = made.recipe.scheme(0, role).rotate
        objective = OBJECTIVES[rotate.metric]
        layers = {
            number: {"layer_id": number, "rotation": (one[0] if shared else one).clone()}
            for number, one in enumerate(rotations)
        }
        state = {"format_version": 1 if shared else 2, "objective": objective, "layers": layers}
        state["source_grouping"] = "layer" if shared else "head"
        out = io.BytesIO()
        torch.save(state, out)
        found[NAMES[role].format(objective)] = out.getvalue()
    return found


def _check(recipe: Recipe, geometry: Geometry) -> None:
    """ValueError unless all that is fitted for every scheme is a rotation of each head."""
    recipe.check(geometry)
    for layer in range(geometry.layers):
        for role in ROLES:
            if codec.specs(recipe, layer, role, geometry).keys() != {"rotate.rotation"}:
                raise ValueError(
                    f"{recipe.name}, layer {layer} {role}: rotation files hold a rotation and nothing else; use a "
                    "recipe of oscar, as oscar-2bit"
                )


# ---- files of strangers ----------------------------------------------------------------------------------------------


def _unpickled(data: bytes, limit: int, name: str) -> Any:
    """Load a file of torch.save; ArtifactError for any other file, or one that unpacks to more than `limit` bytes."""
    if not data.startswith(ZIP):
        raise ArtifactError(f"{name}: no file of torch.save, which is a zip archive; save its dictionary again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in text, and of names that are there twice
            return torch.load(io.BytesIO(_packed(data, limit)), map_location="cpu", weights_only=True)
    except (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
            pickle.UnpicklingError, zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(f"{name}: no file of tensors and plain containers alone: {reason:.160}") from None


def _packed(data: bytes, limit: int) -> bytes:
    """The archive written anew; its pickle is checked."""
    out, names = io.BytesIO(), set()
    with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(out, "w") as made:
        for member in given.infolist():
            is_pickle = member.filename.endswith(".pkl")
            limit -= member.file_size
            if limit < 0 or (is_pickle and member.file_size > PICKLE) or member.filename in names:
                raise ValueError(f"{member.filename:.80} is there twice, or too large")
            names.add(member.filename)
            content = given.read(member)
            if is_pickle:
                _check_pickle(content)
            made.writestr(member.filename, content)
    return out.getvalue()


def _check_pickle(code: bytes) -> None:
    """Raise ValueError for a pickle that makes a tuple whose hash takes more than COST steps.

    The steps are those of the objects on the unpickler's stack: a tuple's are those of its items and one.
    """
    mark = -1
    stack: list[int] = []
    memo: dict[int, int] = {}
    for step, argument, _ in pickletools.genops(code):
        if step.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else int(str(argument))] = stack[-1]
            continue
        if step.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
            continue
        taken: list[int] = []
        wanted = len(step.stack_before)
        if pickletools.markobject in step.stack_before:
            while (item := stack.pop()) != mark:
                taken.append(item)
            wanted -= 2  # the mark, and what is above it
        taken += [stack.pop() for _ in range(wanted)]
        cost = 1 + sum(taken) if step.name.startswith("TUPLE") else 1
        if cost > COST or mark in taken:
            raise ValueError("tuples in tuples, which no tensor needs")
        stack += [mark if one is pickletools.markobject else max(cost, *taken, 1) for one in step.stack_after]
