"""List the caches of a benchmark: 16 bit, transformers' quantized caches, recipes and artifacts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvq_calib.evaluate.subject import Subject, find
from kvq_calib.model.files import ModelFiles
from kvq_runtime.hf import KVQCache

QUANTIZED = ("quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit")  # transformers' own
AXES = {"quanto": 0, "hqq": 1}  # of the groups that each backend is used with


@dataclass(frozen=True)
class Contender:
    """A cache that takes part.

    make     an empty one for a model
    recipe   the name of its recipe; "" for transformers' own, which is attended to by sdpa
    """

    name: str
    make: Callable[[PreTrainedModel], Cache]
    recipe: str = ""


def uncompressed(dtype: torch.dtype) -> Contender:
    """Return the cache that all are compared with: keys and values in the model's dtype."""
    return Contender(f"{8 * dtype.itemsize} bit", lambda model: DynamicCache(config=model.config))


def quantized(name: str) -> Contender:
    """Return one of transformers' quantized caches, with its default groups and recent tokens."""
    if name not in QUANTIZED:
        raise ValueError(f"--beside {name!r:.80}; use {', '.join(QUANTIZED)}, or none")
    backend, _, bits = name.removesuffix("bit").partition("-")
    settings = {"nbits": int(bits), "axis_key": AXES[backend], "axis_value": AXES[backend]}
    return Contender(name, lambda model: QuantizedCache(backend, config=model.config, **settings))


def compressed(texts: Sequence[str], files: ModelFiles, registry: str | None = None) -> list[Contender]:
    """Return the caches of unfitted recipes and of artifacts, found as by `kvq eval`."""
    return [_contender(find(text, files, registry), files) for text in dict.fromkeys(texts)]


def _contender(subject: Subject, files: ModelFiles) -> Contender:
    recipe = subject.recipe.check(files.geometry)
    return Contender(subject.name, lambda model: KVQCache(recipe, model, subject.tensors or None), recipe.name)
