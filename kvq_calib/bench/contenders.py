"""List the caches of a benchmark: 16 bit, transformers' quantized caches, recipes and artifacts."""

from collections.abc import Callable

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvq_calib.evaluate.candidate import find
from kvq_calib.model.files import ModelFiles
from kvq_runtime.hf import KVQCache

QUANTIZED = ("quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit")  # transformers' own
AXES = {"quanto": 0, "hqq": 1}  # of the groups that each backend is used with


Make = Callable[[PreTrainedModel], Cache]  # an empty cache for a model


def uncompressed(dtype: torch.dtype) -> dict[str, Make]:
    """Return the cache that all are compared with: keys and values in the model's dtype."""
    return {f"{8 * dtype.itemsize} bit": lambda model: DynamicCache(config=model.config)}


def quantized(name: str) -> dict[str, Make]:
    """Return one of transformers' quantized caches, with its default groups and recent tokens."""
    if name not in QUANTIZED:
        raise ValueError(f"--beside {name!r:.80}; use {', '.join(QUANTIZED)}, or none")
    backend, _, bits = name.removesuffix("bit").partition("-")
    settings = {"nbits": int(bits), "axis_key": AXES[backend], "axis_value": AXES[backend]}
    return {name: lambda model: QuantizedCache(backend, config=model.config, **settings)}


def compressed(text: str, files: ModelFiles, registry: str | None = None) -> dict[str, Make]:
    """Return the cache of an unfitted recipe or an artifact, found as by `kvq eval`."""
    candidate = find(text, files, registry)
    recipe = candidate.recipe.check(files.geometry)
    return {candidate.name: lambda model: KVQCache(recipe, model, candidate.tensors or None)}
