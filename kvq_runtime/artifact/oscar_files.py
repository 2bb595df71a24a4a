"""Read and write OSCAR's rotation files: a pickled dictionary, {"layers": {layer: {"rotation": tensor, ...}}}, by role.

A rotation is [D, D], one for all heads of a layer (`format_version` 1), or [H, D, D] (2). Files are read by
`torch_archive`, which makes tensors and plain containers and runs nothing else.

Source: Zhou et al., 2026 (OSCAR), the authors' `compute_kv_rotation.py` and its loaders.
Differs: eigenvalues, which the authors' files hold beside a rotation and no loader reads, are not kept.
"""

import io
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact import torch_archive
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.codec import codec
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.recipe import Recipe

TOLERANCE = 5e-3  # of RᵀR - 1, as the authors check what they write; files in bfloat16 keep it
OBJECTIVES = {"queries": "qqt_r_h_pbr", "attended": "sst_r_h_pbr", "output": "output_r_h_pbr"}
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
    state = torch_archive.load(data, _largest(geometry), name)
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
    return (16 * geometry.kv_heads * geometry.head_size**2 + (1 << 16)) * geometry.layers + 2 * torch_archive.PICKLE


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
