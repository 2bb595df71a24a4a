"""The contenders of a benchmark: recipes and artifacts, and transformers' own caches beside them.

Time and bytes depend on the shapes of fitted tensors, not on what is in them: a recipe that is to be fitted, and of
which there is no artifact, takes part with random ones, with a note.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvq_calib.evaluate.subject import Subject, find
from kvq_calib.model.files import ModelFiles
from kvq_runtime.artifact import recipe_text
from kvq_runtime.codec import codec
from kvq_runtime.errors import NotFound
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import Recipe

# transformers' quantized caches: of quanto and hqq bits, and the axis of the groups that each backend is used with
BESIDE = {
    "quanto-2bit": {"nbits": 2, "axis_key": 0, "axis_value": 0},
    "quanto-4bit": {"nbits": 4, "axis_key": 0, "axis_value": 0},
    "hqq-2bit": {"nbits": 2, "axis_key": 1, "axis_value": 1},
    "hqq-4bit": {"nbits": 4, "axis_key": 1, "axis_value": 1},
    "fp8": {},
}
RANDOM = "random tensors in place of fitted ones"
STOCK = "sdpa"  # what transformers' own caches are attended to with


@dataclass(frozen=True)
class Contender:
    """A cache that takes part.

    name     in tables and files
    make     an empty one for a model
    recipe   the name of its recipe; "" of transformers' own
    note     what a reader of its figures has to know
    """

    name: str
    make: Callable[[PreTrainedModel], Cache]
    recipe: str = ""
    note: str = ""

    @property
    def attention(self) -> str:
        """The attention that the model uses with the cache."""
        return "kvq" if self.recipe else STOCK


def plain(dtype: torch.dtype) -> Contender:
    """The cache that all are compared with: keys and values in the model's dtype, "16 bit" where that has 16."""
    return Contender(f"{8 * dtype.itemsize} bit", lambda model: DynamicCache(config=model.config))


def quantized(name: str) -> Contender:
    """Return one of transformers' quantized caches, with its default groups and recent tokens. Else ValueError."""
    if name not in BESIDE:
        raise ValueError(f"--beside {name!r:.80}; use {', '.join(BESIDE)}, or none")
    backend = name.partition("-")[0]
    return Contender(name, lambda model: QuantizedCache(backend, config=model.config, **BESIDE[name]))


def ours(texts: Sequence[str], files: ModelFiles, registry: str | None = None) -> list[Contender]:
    """The caches of recipes, as `recipe_text.read` takes them, and of artifacts.

    Raises NotFound for what is neither, ValueError for a recipe that the model does not allow or a name that two have.
    """
    found: dict[str, tuple[Subject, str]] = {}
    for text in texts:
        subject, note = _subject(text, files, registry)
        if found.setdefault(subject.name, (subject, note))[0].identity != subject.identity:
            raise ValueError(f"two recipes are called {subject.name}; give one of them another name, as in +name=mine")
    return [_contender(subject, note, files) for subject, note in found.values()]


def _contender(subject: Subject, note: str, files: ModelFiles) -> Contender:
    recipe = subject.recipe.check(files.geometry)
    return Contender(subject.name, lambda model: KVQCache(recipe, model, subject.tensors or None), recipe.name, note)


def _subject(text: str, files: ModelFiles, registry: str | None) -> tuple[Subject, str]:
    """Find the subject that a text names, and a note. A recipe to be fitted, without artifact, gets random tensors."""
    try:
        return find(text, files, registry), ""
    except NotFound:
        if not recipe_text.written(text):
            raise
        recipe = recipe_text.read(text).check(files.geometry)
        return Subject(recipe.name, recipe, random_tensors(recipe, files.geometry)), RANDOM


def random_tensors(recipe: Recipe, geometry: Geometry) -> Mapping[str, Tensor]:
    """Tensors of the shapes that a fit of the recipe has."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, (shape, dtype) in codec.all_specs(recipe, geometry).items():
        x = 0.02 * torch.randn(shape, generator=generator)
        found[name] = x.to(dtype) if dtype.is_floating_point else (100 * x).to(dtype)
    return found
