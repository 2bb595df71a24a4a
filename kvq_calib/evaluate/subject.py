"""The subject of an evaluation: a fitted artifact, or a recipe that needs no calibration; and what its cache costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvq_calib.model.files import ModelFiles
from kvq_calib.run import plan
from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact, load
from kvq_runtime.geometry import Geometry, Sliding
from kvq_runtime.recipe import Recipe, families, presets
from kvq_runtime.registry import reference
from kvq_runtime.registry import resolve as registry
from kvq_runtime.store.block_errors import Bounds, bounds_in
from kvq_runtime.store.estimate import Sizes
from kvq_runtime.store.memory import asymptotic_bits

TOKENS = 4096


@dataclass(frozen=True)
class Subject:
    """A recipe with its tensors, to be evaluated.

    name       as the user gave it
    sha256     of the artifact; None for a recipe that needs none
    published  whether a registry holds it, and so keeps its records
    bounds     of the errors of blocks; None: they are not known
    """

    name: str
    recipe: Recipe
    tensors: Mapping[str, Tensor]
    sha256: str | None = None
    published: bool = False
    bounds: Bounds | None = None

    @staticmethod
    def of(artifact: Artifact, sha256: str, name: str | None = None, published: bool = True) -> "Subject":
        """An artifact at hand."""
        name, bounds = name or artifact.recipe.name, bounds_in(artifact.fit)
        return Subject(name, artifact.recipe, artifact.tensors, sha256, published, bounds)

    @property
    def identity(self) -> list[Any]:
        """All that its measurements depend on, whatever it is called: JSON."""
        return [self.sha256, self.recipe.to_json()]


def find(given: str, files: ModelFiles, registry_url: str | None = None) -> Subject:
    """A recipe that needs no calibration, as `recipe_text.read` takes it; else an artifact: a reference or a path.

    Raises NotFound for what is in no registry, a recipe to be fitted among it; ArtifactError for another model's.
    """
    known = recipe_text.read(given) if recipe_text.written(given) else None
    if known is not None and not known.fitted:
        return Subject(known.name, known, {})
    try:
        found = registry.resolve_name(given if known is None else known.name, registry_url)
    except registry.NotFound as error:
        if known is None:
            raise
        text = f"recipe {known.name} has fitted stages, and no artifact has that name: {error}"
        raise registry.NotFound(text) from None
    artifact = load(found.path, found.sha256, found.size)
    fingerprint.check_match(artifact.fingerprint, files.fingerprint())
    return Subject.of(artifact, found.sha256, given, published=bool(found.version))


def keep(subject: Subject, record: Mapping[str, Any], registry_url: str | None = None) -> None:
    """Store what was measured in the registry that holds the artifact; of another subject, nothing."""
    if not subject.published:
        return
    kept = reference.parse(subject.name)
    assert isinstance(kept, reference.Reference), "what a registry holds was asked for by a reference"
    registry.open_registry(kept.registry or registry_url).add_evaluation(record, kept.name)


def compared() -> list[str]:
    """The names of the recipes that `kvq compare` takes of each family: those of its `FAMILY`."""
    return [name for family in families().values() for name in family.compared]


def choose(asked: Sequence[str], files: ModelFiles) -> tuple[list[Recipe], list[str]]:
    """The recipes to compare, and why others are not among them.

    asked   texts as `recipe_text.read` takes them, each of which must suit the model; ["all"]; or nothing: `compared`
    """

    def suited(recipe: Recipe) -> Recipe:
        return plan.check(recipe.check(files.geometry), files)

    known = presets()
    if asked and list(asked) != ["all"]:
        return recipe_text.distinct(suited(recipe_text.read(text)) for text in asked), []
    found, notes = [], []
    for name in known if asked else compared():
        try:
            found.append(suited(known[name]))
        except ValueError as error:
            notes.append(f"{name} is left out: {error}")
    return found, notes


def costs(recipe: Recipe, geometry: Geometry, sliding: Sliding, length: int) -> dict[str, Any]:
    """Bits per element: asymptotic, and of caches that hold `length` and 4096 tokens; bytes of the latter.

    Every byte that a cache holds counts, computed from shapes, layers that slide over a window included. A dynamic
    window is billed at its longest.
    """
    sizes = Sizes(recipe, geometry, sliding=sliding)
    here, there = sizes.at(length), sizes.at(TOKENS)
    return {
        "asymptotic": asymptotic_bits(recipe, geometry),
        "at_length": here.sequence_bits,
        f"at_{TOKENS}": there.sequence_bits,
        f"all_at_{TOKENS}": there.bits,
        f"bytes_at_{TOKENS}": there.total,
        f"exact_bytes_at_{TOKENS}": there.exact,
        "shared_bytes": there.shared,
    }
