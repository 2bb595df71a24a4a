"""The contenders of a benchmark: recipes and artifacts, and transformers' own caches beside them.

Time and bytes depend on the shapes of fitted tensors, not on what is in them: a recipe that is to be fitted, and of
which there is no artifact, takes part with random ones, with a note.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvq_calib.evaluate.subject import Subject, find
from kvq_calib.model.files import ModelFiles
from kvq_runtime.artifact import recipe_text
from kvq_runtime.codec import codec
from kvq_runtime.errors import NotFound, extra
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import Recipe

BESIDE = ("quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit", "fp8")  # transformers' quantized caches, by default
GROUP = 64  # of quanto and hqq: elements with one scale; transformers' default
RECENT = 128  # of quanto and hqq: tokens that stay exact; transformers' default
AXIS = {"quanto": 0, "hqq": 1}  # that of the groups: what each backend is used with
PACKAGE = {"quanto": "optimum-quanto", "hqq": "hqq"}
RANDOM = "random tensors in place of fitted ones"
STOCK = "sdpa"  # what transformers' own caches are attended to with


@dataclass(frozen=True)
class Contender:
    """A cache that takes part.

    name     in tables and files
    make     an empty one for a model
    recipe   the name of its recipe; "" of transformers' own
    pinned   what else it depends on: the sha256 of its artifact, or the recipe's settings
    note     what a reader of its figures has to know
    """

    name: str
    make: Callable[[PreTrainedModel], Cache]
    recipe: str = ""
    pinned: Any = None
    note: str = ""

    @property
    def attention(self) -> str:
        """The attention that the model uses with the cache."""
        return "kvq" if self.recipe else STOCK


def plain(dtype: torch.dtype) -> Contender:
    """The cache that all are compared with: keys and values in the model's dtype, "16 bit" where that has 16."""
    return Contender(f"{8 * dtype.itemsize} bit", lambda model: DynamicCache(config=model.config))


def quantized(name: str) -> Contender:
    """One of transformers' quantized caches: quanto-2bit, quanto-4bit, hqq-1bit to hqq-8bit, fp8. Else ValueError."""
    found = re.fullmatch(r"(quanto)-([24])bit|(hqq)-([12348])bit|(fp8)", name)
    if found is None:
        raise ValueError(f"--beside {name!r:.80}; use {', '.join(BESIDE)}, other bits of hqq (1, 2, 3, 4, 8), or none")
    backend, *bits = filter(None, found.groups())
    settings: dict[str, Any] = {}
    if bits:
        axis = AXIS[backend]
        settings = {"nbits": int(bits[0]), "axis_key": axis, "axis_value": axis, "q_group_size": GROUP}
        settings["residual_length"] = RECENT
    return Contender(name, lambda model: QuantizedCache(backend, config=model.config, **settings))


def absent(contender: Contender, model: PreTrainedModel) -> str:
    """Return why one of transformers' quantized caches cannot be made here, and what to install; "" if it can."""
    try:
        contender.make(model)
    except ImportError:
        return f"needs {PACKAGE[contender.name.partition('-')[0]]}; {extra('bench')}"
    except ValueError as error:
        return f"not in transformers {metadata.version('transformers')}: {str(error).partition(chr(10))[0]}"
    return ""


def ours(texts: Sequence[str], files: ModelFiles, registry: str | None = None) -> list[Contender]:
    """The caches of recipes, as `recipe_text.read` takes them, and of artifacts.

    Raises NotFound for what is neither, ValueError for a recipe that the model does not allow or a name that two have.
    """
    found: dict[str, Contender] = {}
    for text in texts:
        one = _of(text, files, registry)
        if found.setdefault(one.name, one).pinned != one.pinned:
            raise ValueError(f"two recipes are called {one.name}; give one of them another name, as in +name=mine")
    return list(found.values())


def _of(text: str, files: ModelFiles, registry: str | None) -> Contender:
    subject, note = _subject(text, files, registry)
    recipe = subject.recipe.check(files.geometry)
    pinned = subject.sha256 or recipe.to_json()
    return Contender(
        subject.name, lambda model: KVQCache(recipe, model, subject.tensors or None), recipe.name, pinned, note
    )


def _subject(text: str, files: ModelFiles, registry: str | None) -> tuple[Subject, str]:
    """Find the subject that a text names, and a note. A recipe to be fitted, without artifact, gets random tensors."""
    try:
        return find(text, files, registry), ""
    except NotFound:
        if not recipe_text.written(text):
            raise
        recipe = recipe_text.read(text).of_vocabulary(files.vocabulary).check(files.geometry)
        return Subject(recipe.name, recipe, random_tensors(recipe, files.geometry)), RANDOM


def random_tensors(recipe: Recipe, geometry: Geometry) -> Mapping[str, Tensor]:
    """Tensors of the shapes that a fit of the recipe has."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, (shape, dtype) in codec.all_specs(recipe, geometry).items():
        x = 0.02 * torch.randn(shape, generator=generator)
        found[name] = x.to(dtype) if dtype.is_floating_point else (100 * x).to(dtype)
    return found
