"""The subject of an evaluation: a fitted artifact, or a recipe that needs no calibration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvq_calib.model.files import ModelFiles
from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact, load
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry import reference
from kvq_runtime.registry import resolve as registry


@dataclass(frozen=True)
class Subject:
    """A recipe with its tensors, to be evaluated.

    name       as the user gave it
    sha256     of the artifact; None for a recipe that needs none
    published  whether a registry holds it, and so keeps its records
    """

    name: str
    recipe: Recipe
    tensors: Mapping[str, Tensor]
    sha256: str | None = None
    published: bool = False

    @staticmethod
    def of(artifact: Artifact, sha256: str, name: str | None = None, published: bool = True) -> "Subject":
        """An artifact at hand."""
        return Subject(name or artifact.recipe.name, artifact.recipe, artifact.tensors, sha256, published)


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
