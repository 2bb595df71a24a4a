"""Find what the variable KVQ_CACHE names, and check it against the model that is served.

KVQ_CACHE=lloyd-3bit                        a recipe that needs no artifact, with settings if wanted (+key.bits=4)
KVQ_CACHE=qwen2.5-7b-lloyd-3bit@production  an artifact of the registry $KVQ_REGISTRY
KVQ_CACHE=hf://my-org/my-artifact@1.2.0     of a Hub
KVQ_CACHE=artifacts/mine.safetensors        a file, or a folder with kvq.safetensors
KVQ_CACHE=production.lock                   what a lock file pins; its name ends in .lock or .lock.json
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.lock import read_lock
from kvq_runtime.registry.resolve import load_artifact
from kvq_runtime.vllm import served

VARIABLE = "KVQ_CACHE"
LOCKS = (".lock", ".lock.json")
TYPICAL = MODELS["qwen2.5-7b"]  # asked before the model is known; it is asked again for the model itself


@dataclass(frozen=True)
class Source:
    """What is served: a recipe, and the artifact it is of, if it is fitted."""

    reference: str
    recipe: Recipe
    artifact: Artifact | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {} if self.artifact is None else self.artifact.tensors


def asked() -> str | None:
    """What the variable says; None: it is not set, or empty, and vLLM is left as it is."""
    return os.environ.get(VARIABLE) or None


@lru_cache(maxsize=4)
def load(reference: str) -> Source:
    """Load it, once a process. Raises what `load_artifact` does, and ValueError, with the variable's name."""
    try:
        return _load(reference)
    except (ValueError, OSError, RuntimeError) as error:
        error.args = (f"{VARIABLE}={reference}: {error}",)
        raise


def _load(reference: str) -> Source:
    source = find(reference)
    served.check(source.recipe, TYPICAL if source.artifact is None else source.artifact.fingerprint.geometry)
    return source


def find(reference: str) -> Source:
    """What a reference names, whether it can be served or not. Raises what `load_artifact` does, and ValueError."""
    if recipe_text.written(reference) and not reference.endswith(LOCKS):
        recipe = recipe_text.read(reference)
        if recipe.fitted:
            raise ValueError(f"{recipe.name} has to be fitted to a model: kvq-calibrate --recipe {recipe.name}")
        return Source(reference, recipe, None)
    lock = reference if reference.endswith(LOCKS) else None
    artifact = load_artifact(read_lock(lock).reference, lock=lock) if lock else load_artifact(reference)
    return Source(reference, artifact.recipe, artifact)


def match(source: Source, config: Mapping[str, Any], model: str, revision: str | None) -> Geometry:
    """The shape of the served model; ArtifactError unless the artifact is of it. Arguments as for `check_model`."""
    geometry = Geometry.from_config(config)
    if source.artifact is not None:
        ours = fingerprint.from_config(config, _weights(model, revision))
        fingerprint.check_match(source.artifact.fingerprint, ours)
    return geometry


def check_model(source: Source, config: Mapping[str, Any], model: str, revision: str | None) -> Geometry:
    """The shape of the served model. Raises ValueError or ArtifactError unless the recipe and the artifact are for it.

    config     of the model's decoder, as in config.json
    model      its folder or its id on a Hub, whose files vLLM has fetched: their projections are compared, where found
    """
    try:
        geometry = match(source, config, model, revision)
        served.check(source.recipe, geometry)
    except ArtifactError as error:
        raise ArtifactError(f"{VARIABLE}={source.reference}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={source.reference}: {error}") from None
    return geometry


def _weights(model: str, revision: str | None) -> Callable[[int, str], Tensor | None]:
    """(layer, "k_proj") → the matrix in the model's safetensors files; None for one that is not there by that name."""
    folder = folder_of(model, revision)
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        with safetensors.safe_open(path, "pt") as file:
            places |= {name: path for name in file.keys() if name.endswith(("k_proj.weight", "v_proj.weight"))}  # noqa: SIM118

    def weight(layer: int, projection: str) -> Tensor | None:
        ends = f"layers.{layer}.self_attn.{projection}.weight"
        name = next((name for name in places if name.endswith(ends)), None)
        if name is None:
            return None
        with safetensors.safe_open(places[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found if found.dtype != torch.uint8 else None

    return weight


def folder_of(model: str, revision: str | None) -> Path | None:
    """Where a model's files are on this machine; None: nowhere."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
