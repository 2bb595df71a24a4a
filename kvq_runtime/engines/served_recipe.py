"""Read the recipe or artifact that an engine's cache is to use; compare it with the served model, refuse a recipe that
the engine cannot take, with the nearest that it can, and give a worker of tensor parallelism its heads' part.

lloyd-3bit                        a recipe that needs no artifact, with settings if wanted (+key.bits=4)
qwen2.5-7b-mean-lloyd-3bit-post@production  an artifact of the registry $KVQ_REGISTRY
hf://my-org/my-artifact@1.2.0     of a Hub
artifacts/mine.safetensors        a file, or a folder with kvq.safetensors
production.lock                   what a lock file pins; its name ends in .lock or .lock.json

A tensor of a fit has a dimension, or none, that grows with the number of KV heads: a worker takes its run of it. That
is right where neither a rotation nor a group of rounding reaches over heads; other recipes are refused.
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
from kvq_runtime.recipe import Recipe, presets
from kvq_runtime.registry.lock import read_lock
from kvq_runtime.registry.resolve import load_artifact
from kvq_runtime.store.memory import asymptotic_bits

LOCKS = (".lock", ".lock.json")


@dataclass(frozen=True)
class Source:
    """A recipe, and the artifact that it comes from, if it is fitted."""

    reference: str
    recipe: Recipe
    artifact: Artifact | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {} if self.artifact is None else self.artifact.tensors


def read(reference: str) -> Source:
    """Read a reference. Raises as `load_artifact` does, and ValueError for a recipe that has to be fitted."""
    if reference.endswith(LOCKS):
        artifact = load_artifact(read_lock(reference).reference, lock=reference)
    elif recipe_text.written(reference):
        recipe = recipe_text.read(reference)
        if recipe.fitted:
            raise ValueError(f"{recipe.name} has to be fitted to a model: kvq-calibrate --recipe {recipe.name}")
        return Source(reference, recipe, None)
    else:
        artifact = load_artifact(reference)
    return Source(reference, artifact.recipe, artifact)


def match(source: Source, config: Mapping[str, Any], model: str, revision: str | None) -> Geometry:
    """The shape of the served model. Raises ArtifactError unless the artifact, if there is one, is for it.

    config     of the model's decoder, as in config.json
    model      its folder or its id on a Hub, whose files are on this machine: their projections are compared, if found
    """
    if source.artifact is not None:
        ours = fingerprint.from_config(config, _weights(folder(model, revision)))
        fingerprint.check_match(source.artifact.fingerprint, ours)
    return Geometry.from_config(config)


def config(model: str, revision: str | None) -> Mapping[str, Any]:
    """config.json of the model's decoder. Raises NotFound if it is not on this machine."""
    files = folder(model, revision)
    path = None if files is None else files / "config.json"
    if path is None or not path.is_file():
        raise NotFound(
            f"no config.json of {model} on this machine; fetch it (hf download {model} config.json), or name a folder "
            "that has it"
        )
    found = json_object(path)
    return found.get("text_config", found)


def folder(model: str, revision: str | None) -> Path | None:
    """Return this machine's folder of a model's files; None: it has none."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


# of a decoder: not of a tower beside it, whose layers may be named alike
_PROJECTION = re.compile(
    r"(model\.|language_model\.model\.|model\.language_model\.|model\.text_model\.)?"
    r"layers\.\d+\.self_attn\.[kv]_proj\.weight"
)


def _weights(files: Path | None) -> Callable[[int, str], Tensor | None]:
    """(layer, "k_proj") → the matrix in a folder's safetensors files; None for one that is not there by that name."""
    places: dict[str, Path] = {}
    for path in sorted(files.glob("*.safetensors")) if files is not None else ():
        with safetensors.safe_open(path, "pt") as file:
            places |= {name: path for name in file.keys() if _PROJECTION.fullmatch(name)}  # noqa: SIM118

    def weight(layer: int, projection: str) -> Tensor | None:
        ends = f"layers.{layer}.self_attn.{projection}.weight"
        name = next((name for name in places if name.endswith(ends)), None)
        if name is None:
            return None
        with safetensors.safe_open(places[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found if found.dtype != torch.uint8 else None

    return weight


@dataclass(frozen=True)
class Engine:
    """An engine that takes some recipes.

    cannot   begins the sentence of a refusal, before the recipe's name: "vLLM cannot serve"
    can      ends "the nearest recipe that it can ..."
    decides  what is the engine's to decide, and so no policy's, a clause
    reason   why it cannot take a recipe without policies, a clause; None: it can
    """

    cannot: str
    can: str
    decides: str
    reason: Callable[[Recipe], str | None]

    def refusal(self, recipe: Recipe) -> str | None:
        """Return why the engine cannot take a recipe, a clause; None: it can."""
        if recipe.policies:
            kinds = ", ".join(policy.kind for policy in recipe.policies)
            return f"it chooses among tokens, or waits for a prompt ({kinds}), and {self.decides}"
        return self.reason(recipe)

    def check(self, recipe: Recipe, geometry: Geometry) -> None:
        """Raise ValueError, a sentence that names the nearest recipe that it takes, unless it takes this one."""
        reason = self.refusal(recipe)
        if reason is not None:
            near = self.nearest(recipe, geometry)
            raise ValueError(
                f"{self.cannot} {recipe.name}: {reason}; the nearest recipe that it can {self.can} is {near.name}, "
                f"{bits(near, geometry):.3g} bits (docs/serve-vllm.md lists all)"
            )
        recipe.check(geometry)

    def nearest(self, recipe: Recipe, geometry: Geometry) -> Recipe:
        """The recipe without calibration that it takes and whose bits are nearest."""
        wanted = bits(recipe, geometry)
        return min(self.plain(geometry), key=lambda one: abs(bits(one, geometry) - wanted))

    def plain(self, geometry: Geometry) -> list[Recipe]:
        """The recipes that need no artifact and that it takes on this shape."""
        found = (recipe for recipe in presets().values() if not recipe.fitted and self.refusal(recipe) is None)
        return [recipe for recipe in found if _allowed(recipe, geometry)]


def _allowed(recipe: Recipe, geometry: Geometry) -> bool:
    """True if the recipe can be used with these head sizes."""
    try:
        recipe.check(geometry)
    except ValueError:
        return False
    return True


def bits(recipe: Recipe, geometry: Geometry) -> float:
    """Asymptotic bits per element; of a recipe with the same schemes in all layers those of one."""
    return asymptotic_bits(recipe, geometry if recipe.layers else replace(geometry, layers=1))


@dataclass(frozen=True)
class Share:
    """A worker's share of the model's KV heads: `part` of `parts` equal runs."""

    part: int = 0
    parts: int = 1


def share_of(geometry: Geometry, rank: int, ranks: int) -> Share:
    """The share of a rank; where ranks are more than heads, neighbours have the same head."""
    parts = min(ranks, geometry.kv_heads)
    if geometry.kv_heads % parts or ranks % parts:
        raise ValueError(
            f"{ranks} workers cannot share {geometry.kv_heads} KV heads evenly; choose a "
            f"divisor of {geometry.kv_heads} for --tensor-parallel-size"
        )
    return Share(rank * parts // ranks, parts)


def narrowed(recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor], share: Share):
    """(geometry, tensors) of a worker's heads. Raises ValueError where codes are shared between heads."""
    if share.parts == 1:
        return geometry, tensors
    _check_split(recipe, geometry)
    own = narrower(geometry, share)
    whole, part = codec.all_specs(recipe, geometry), codec.all_specs(recipe, own)
    return own, {name: _run(tensors[name], whole[name][0], part[name][0], share) for name in part}


def narrower(geometry: Geometry, share: Share) -> Geometry:
    """The shape of a worker's part."""
    return replace(geometry, kv_heads=geometry.kv_heads // share.parts)


def _run(tensor: Tensor, whole: tuple[int, ...], part: tuple[int, ...], share: Share) -> Tensor:
    for dim, (all_of, some) in enumerate(zip(whole, part, strict=True)):
        if all_of != some:
            return tensor.narrow(dim, share.part * some, some).contiguous()
    return tensor


def _check_split(recipe: Recipe, geometry: Geometry) -> None:
    size = geometry.head_size
    if recipe.cross_layer:
        raise ValueError(
            f"{recipe.name} predicts each head from all heads of the layer below, which a worker does not have; use "
            "--tensor-parallel-size 1, or a recipe without prediction"
        )
    for scheme in recipe.schemes:
        group = scheme.quantize.group_size(geometry.width, geometry)
        turned = scheme.rotate.size(geometry.width, geometry) if scheme.rotate is not None else 1
        if (group is not None and size % group) or size % turned:
            raise ValueError(
                f"{recipe.name} rotates or rounds several KV heads together, so that workers cannot have them apart; "
                'use a recipe per head (group "head"), or --tensor-parallel-size 1'
            )
