"""Read the recipe or artifact that an engine serves, compare it with the model, and cut a worker's shard of it.

lloyd-3bit                        a recipe that needs no artifact, with settings if wanted (+key.bits=4)
qwen2.5-7b-mean-lloyd-3bit-post@production  an artifact of the registry $KVQ_REGISTRY
hf://my-org/my-artifact@1.2.0     of a Hub
artifacts/mine.safetensors        a file, or a folder with kvq.safetensors
production.lock                   the version in a lock file; its name ends in .lock or .lock.json

Each tensor of a fit has at most one dimension that grows with the number of KV heads; a worker of tensor parallelism
takes its run of it. Recipes with a rotation or a group of rounding across heads are refused there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import codec
from kvq_runtime.disk.files import json_object
from kvq_runtime.errors import NotFound
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.lock import read_lock
from kvq_runtime.registry.resolve import load_artifact

LOCKS = (".lock", ".lock.json")
# of a decoder, not of a vision tower whose layers may have the same names
_PROJECTION = re.compile(
    r"(model\.|language_model\.model\.|model\.language_model\.|model\.text_model\.)?"
    r"layers\.\d+\.self_attn\.[kv]_proj\.weight"
)


@dataclass(frozen=True)
class ServedRecipe:
    """A recipe, and its artifact if it is fitted."""

    reference: str
    recipe: Recipe
    artifact: Artifact | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {} if self.artifact is None else self.artifact.tensors


def read(reference: str) -> ServedRecipe:
    """Read a reference. Raises as `load_artifact` does, and ValueError for a recipe that has to be fitted."""
    if reference.endswith(LOCKS):
        artifact = load_artifact(read_lock(reference).reference, lock=reference)
    elif recipe_text.written(reference):
        recipe = recipe_text.read(reference)
        if recipe.fitted:
            raise ValueError(f"{recipe.name} has to be fitted to a model: kvq-calibrate --recipe {recipe.name}")
        return ServedRecipe(reference, recipe, None)
    else:
        artifact = load_artifact(reference)
    return ServedRecipe(reference, artifact.recipe, artifact)


def match(served: ServedRecipe, config: Mapping[str, Any], model: str, revision: str | None) -> Geometry:
    """Return the shape of the served model. Raises ArtifactError for an artifact of another model.

    config   of the model's decoder, as in config.json
    model    its folder or its id on a Hub; projections are compared if its files are on this machine
    """
    if served.artifact is not None:
        ours = fingerprint.from_config(config, projections(model_folder(model, revision)))
        fingerprint.check_match(served.artifact.fingerprint, ours)
    return Geometry.from_config(config)


def model_config(model: str, revision: str | None) -> Mapping[str, Any]:
    """Return config.json of the model's decoder. Raises NotFound if it is not on this machine."""
    folder = model_folder(model, revision)
    if folder is None or not (folder / "config.json").is_file():
        raise NotFound(
            f"no config.json of {model} on this machine; fetch it (hf download {model} config.json), or name a folder "
            "that has it"
        )
    config = json_object(folder / "config.json")
    return config.get("text_config", config)


def model_folder(model: str, revision: str | None) -> Path | None:
    """Return this machine's folder of a model's files; None if there is none."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


def projections(folder: Path | None) -> Callable[[int, str], Tensor | None]:
    """Return (layer, "k_proj") → the matrix in a folder's safetensors files, None if there is none of that name."""
    matrices: dict[str, Tensor] = {}  # mapped from disk
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        with safetensors.safe_open(path, "pt") as file:
            matrices |= {name: file.get_tensor(name) for name in file.keys() if _PROJECTION.fullmatch(name)}  # noqa: SIM118

    def weight(layer: int, projection: str) -> Tensor | None:
        ending = f"layers.{layer}.self_attn.{projection}.weight"
        matrix = next((matrix for name, matrix in matrices.items() if name.endswith(ending)), None)
        return None if matrix is None or matrix.dtype == torch.uint8 else matrix

    return weight


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A worker's shard of the model's KV heads: `part` of `parts` equal runs."""

    part: int = 0
    parts: int = 1

    def geometry(self, whole: Geometry) -> Geometry:
        """Return the shape of the shard."""
        return replace(whole, kv_heads=whole.kv_heads // self.parts)

    def tensors(self, recipe: Recipe, whole: Geometry, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the shard of a fit. Raises ValueError where codes are shared between heads."""
        if self.parts == 1:
            return tensors
        _check_heads_apart(recipe, whole)
        shapes, own = codec.all_specs(recipe, whole), codec.all_specs(recipe, self.geometry(whole))
        return {name: self._run(tensors[name], shapes[name][0], own[name][0]) for name in own}

    def _run(self, tensor: Tensor, whole: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
        for dim, (count, part) in enumerate(zip(whole, own, strict=True)):
            if count != part:
                return tensor.narrow(dim, self.part * part, part).contiguous()
        return tensor


def shard_of(geometry: Geometry, rank: int, ranks: int) -> Shard:
    """Return the shard of a rank; where ranks are more than heads, neighbours have the same head."""
    parts = min(ranks, geometry.kv_heads)
    if geometry.kv_heads % parts or ranks % parts:
        raise ValueError(
            f"{ranks} workers cannot share {geometry.kv_heads} KV heads evenly; choose a "
            f"divisor of {geometry.kv_heads} for --tensor-parallel-size"
        )
    return Shard(rank * parts // ranks, parts)


def _check_heads_apart(recipe: Recipe, geometry: Geometry) -> None:
    size = geometry.head_size
    if recipe.cross_layer:
        raise ValueError(
            f"{recipe.name} predicts each head from all heads of the layer below, which a worker does not have; use "
            "--tensor-parallel-size 1, or a recipe without prediction"
        )
    for scheme in recipe.schemes:
        group = scheme.quantize.group_size(geometry.width, geometry)
        rotated = scheme.rotate.size(geometry.width, geometry) if scheme.rotate is not None else 1
        if (group is not None and size % group) or size % rotated:
            raise ValueError(
                f"{recipe.name} rotates or rounds several KV heads together, so that workers cannot have them apart; "
                'use a recipe per head (group "head"), or --tensor-parallel-size 1'
            )
