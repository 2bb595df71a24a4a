"""Describe what the blocks of a set are of, in its about.json: all that decides how tokens become bytes."""

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact.artifact import MAX_LAYERS, MAX_WIDTH
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix import chain
from kvq_runtime.prefix.block_file import BlockFormat
from kvq_runtime.recipe import Recipe

FORMAT = 3  # of names, folders and files; another one finds nothing of it
MORE = ("promised", "coded_sinks")  # of a `BlockFormat`, stated where they are so


def of(form: BlockFormat, model: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return all that decides how tokens become bytes, as JSON; its digest is the name of a set of blocks."""
    fit = None
    if tensors:
        hashed = sha256()
        chain.add_tensors(hashed, tensors)
        fit = hashed.hexdigest()
    return {
        "format": FORMAT,
        "model": model,
        "recipe": form.recipe.to_json(),
        "fit": fit,
        "geometry": asdict(form.geometry),
        "layers": list(form.held),
        "dtype": str(form.dtype).removeprefix("torch."),
    } | {name: True for name in MORE if getattr(form, name)}


def digest(about: Mapping[str, Any]) -> str:
    """sha256 of the JSON of `of`."""
    return sha256(strict_json.dumps(dict(about)).encode()).hexdigest()


def read(folder: Path) -> tuple[dict[str, Any], BlockFormat]:
    """The description of a set of blocks in its folder, and their format. ArtifactError for what `of` does not give."""
    path = folder / "about.json"
    about = strict_json.loads(files.read(path, 1 << 22), str(path))
    if not isinstance(about, dict):
        raise ArtifactError(f"{path}: expected an object; remove the folder {folder}")
    return about, _format_of(about)


def _format_of(about: dict[str, Any]) -> BlockFormat:
    names = {"format", "model", "recipe", "fit", "geometry", "layers", "dtype"}
    more = {name for name in MORE if about.get(name) is True}
    strict_json.keys(about, names | more, "about")
    if about["format"] != FORMAT:
        raise ArtifactError(f"about: format {about['format']!r:.40}; this version reads {FORMAT}")
    try:
        geometry = Geometry(**strict_json.keys(about["geometry"], {"layers", "kv_heads", "head_size"}, "about"))
        if geometry.layers > MAX_LAYERS or geometry.width > MAX_WIDTH:
            raise ValueError(f"{geometry}; at most {MAX_LAYERS} layers and {MAX_WIDTH} channels are read")
        recipe = Recipe.from_json(about["recipe"]).check(geometry)
        dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[about["dtype"]]
        layers = tuple(about["layers"])
        if list(layers) != sorted(set(layers)) or not layers or not set(layers) <= set(range(geometry.layers)):
            raise ValueError(f"layers {layers}")
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"about: {error}") from None
    return BlockFormat(recipe, geometry, layers, dtype, promised="promised" in more, coded_sinks="coded_sinks" in more)
