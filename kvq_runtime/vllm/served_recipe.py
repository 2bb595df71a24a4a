"""Read the recipe or artifact that an engine serves, compare it with the model, and cut a worker's shard of it.

A reference is a recipe's name, with settings if wanted (`lloyd-3bit+key.bits=4`), a reference to an artifact, or a lock
file, whose name ends in .lock or .lock.json.

Each tensor of a fit has at most one dimension that grows with the number of KV heads; a worker of tensor parallelism
takes its run of it. Recipes with a rotation, a gain or a group of
rounding across heads are refused there.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import codec, key_bias
from kvq_runtime.disk.files import json_object
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.families import attending, family_of
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rope
from kvq_runtime.recipe import Recipe, Scheme, with_each
from kvq_runtime.registry.lock import read_lock
from kvq_runtime.registry.resolve import load_artifact

# of a decoder, not of a vision tower whose layers may have the same names
_ATTENTION = (
    r"(?:model\.|language_model\.model\.|model\.language_model\.|model\.text_model\.)?layers\.(\d+)\.self_attn\."
)
_PROJECTION = re.compile(_ATTENTION + r"([kv]_proj)\.weight")
_KEY_BIAS = re.compile(_ATTENTION + r"(k_proj\.bias|k_norm\.weight)")


@dataclass(frozen=True)
class ServedRecipe:
    """A recipe, its artifact if it is fitted, and the tensors of its stages, of the artifact or the model."""

    recipe: Recipe
    artifact: Artifact | None
    tensors: Mapping[str, Tensor]


def read(reference: str) -> ServedRecipe:
    """Read a reference. Raises as `load_artifact` does, and ValueError for a recipe that has to be fitted."""
    lock = reference if reference.endswith((".lock", ".lock.json")) else None
    if lock is None and recipe_text.is_recipe(reference):
        recipe = recipe_text.read(reference)
        if recipe.fitted:
            raise ValueError(f"{recipe.name} has to be fitted to a model: kvq-calibrate --recipe {recipe.name}")
        return ServedRecipe(recipe, None, {})
    artifact = load_artifact(read_lock(lock).reference if lock else reference, lock=lock)
    return ServedRecipe(artifact.recipe, artifact, artifact.tensors)


def match(
    served: ServedRecipe, config: Mapping[str, Any], model: str, revision: str | None
) -> tuple[ServedRecipe, Geometry]:
    """Return what is served for a model, and the model's shape. Raises ArtifactError for an artifact of another model.

    config   of the model's decoder, as in config.json
    model    its folder or its id on a Hub; projections are compared if its files are on this machine
    Keys of a recipe without an artifact are encoded less the bias of k_proj (`codec/key_bias.py`); ValueError if the
    model's files, which hold it, are not on this machine.
    """
    folder, geometry = model_folder(model, revision), Geometry.from_config(config)
    if served.artifact is not None:
        fingerprint.check_match(served.artifact.fingerprint, fingerprint.from_config(config, projections(folder)))
        return served, geometry
    if served.recipe.key_bias == "kept":
        return served, geometry
    if folder is None and (config.get("attention_bias") or str(config.get("model_type")).startswith("qwen2")):
        raise ValueError(f"no files of {model} on this machine, which hold the bias of its keys; give its folder, or "
                         f"{served.recipe.name}+key_bias=kept")  # fmt: skip
    biases = key_biases(folder, config)
    recipe = key_bias.centred(served.recipe, biases)
    return ServedRecipe(recipe, None, key_bias.tensors(recipe, geometry, biases)), geometry


def key_biases(folder: Path | None, config: Mapping[str, Any]) -> key_bias.Biases:
    """Return the biases of `k_proj` by layer of the geometry; none where a norm or a RoPE that varies follows."""
    family, kind = family_of(config), rope.settings(config).get("rope_type", "default")
    if family is None or family.rope == "some layers" or kind not in rope.FIXED_TYPES:
        return {}
    parts = [(parts, x) for name, x in weights(folder) if (parts := _KEY_BIAS.fullmatch(name)) is not None]
    if any(name[2] == "k_norm.weight" for name, _ in parts):
        return {}
    of_model = {int(name[1]): x for name, x in parts}
    return key_bias.nonzero({place: of_model.get(n) for place, n in enumerate(attending(config))})


def model_config(model: str, revision: str | None) -> Mapping[str, Any]:
    """Return config.json of the model's decoder. Raises NotFound if it is not on this machine."""
    folder = model_folder(model, revision)
    if folder is None or not (folder / "config.json").is_file():
        raise NotFound(f"no config.json of {model} on this machine; fetch it: hf download {model} config.json")
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
    matches = ((_PROJECTION.fullmatch(name), matrix) for name, matrix in weights(folder))
    matrices = {(int(parts[1]), parts[2]): matrix for parts, matrix in matches if parts is not None}
    return lambda layer, projection: matrices.get((layer, projection))


def weights(folder: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), mapped from disk, of the safetensors files in a folder, if there are any."""
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ArtifactError(f"{path}: no safetensors file: {error}") from None


@dataclass(frozen=True)
class Shard:
    """A worker's shard of the model's KV heads: `part` of `parts` equal runs."""

    part: int = 0
    parts: int = 1

    def geometry(self, whole: Geometry) -> Geometry:
        """Return the shape of the shard."""
        return replace(whole, kv_heads=whole.kv_heads // self.parts)

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the shard: of runs of latent channels it has those of its heads."""

        def cut(scheme: Scheme) -> Scheme:
            if self.parts == 1 or not getattr(scheme.quantize, "counts", ()):
                return scheme
            quantize: Any = scheme.quantize
            return replace(scheme, quantize=replace(quantize, counts=tuple(n // self.parts for n in quantize.counts)))

        return with_each(recipe, cut)

    def tensors(self, recipe: Recipe, whole: Geometry, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the shard of a fit of the whole recipe. Raises ValueError where codes are shared between heads."""
        if self.parts == 1:
            return tensors
        _check_heads_apart(recipe, whole)
        shard = dict[str, Tensor]()
        for name, (shape, _) in codec.all_specs(self.recipe(recipe), self.geometry(whole)).items():
            x = tensors[name]
            for dim, size in enumerate(shape):
                if size != x.shape[dim]:  # the one that grows with heads
                    x = x.narrow(dim, self.part * size, size)
            shard[name] = x.contiguous()
        return shard


def shard_of(geometry: Geometry, rank: int, ranks: int) -> Shard:
    """Return the shard of a rank; where ranks are more than heads, neighbours have the same head."""
    parts = min(ranks, geometry.kv_heads)
    if geometry.kv_heads % parts or ranks % parts:
        raise ValueError(
            f"{ranks} workers cannot share {geometry.kv_heads} KV heads evenly; give --tensor-parallel-size a divisor"
        )
    return Shard(rank * parts // ranks, parts)


def _check_heads_apart(recipe: Recipe, geometry: Geometry) -> None:
    joined = recipe.cross_layer
    for scheme in recipe.schemes:
        quantize, rotate = scheme.quantize, scheme.rotate
        group = quantize.group_size(geometry.width, geometry)
        apart = rotate is None or getattr(rotate, "group", None) == "head"  # a basis of each head is as wide as a token
        rotated = 1 if rotate is None or apart else rotate.size(geometry.width, geometry)
        joined |= bool(group is not None and geometry.head_size % group) or bool(geometry.head_size % rotated)
        joined |= bool(getattr(quantize, "gain", 0)) and getattr(quantize, "gains", 1) != "head"
    if joined:
        raise ValueError(
            f"{recipe.name} predicts, rotates or rounds several KV heads together, which workers have apart; use a "
            'recipe per head (group "head"), or --tensor-parallel-size 1'
        )
