"""Find the candidates of an evaluation, fitted artifacts or unfitted recipes, and compute the size of their caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvq_calib.model.files import ModelFiles
from kvq_calib.run import plan
from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact, load
from kvq_runtime.codec import key_bias
from kvq_runtime.geometry import Geometry, Sliding
from kvq_runtime.recipe import Recipe, families, presets
from kvq_runtime.registry import reference
from kvq_runtime.registry import resolve as registry
from kvq_runtime.store.block_errors import Bounds, bounds_in
from kvq_runtime.store.memory import Sizes, asymptotic_bits

TOKENS = 4096


@dataclass(frozen=True)
class Candidate:
    """A recipe with its tensors, to be evaluated.

    name       in the user's words
    sha256     of the artifact; None: an unfitted recipe
    published  whether a registry holds it, and with it its records
    bounds     of the errors of blocks; None: unknown
    """

    name: str
    recipe: Recipe
    tensors: Mapping[str, Tensor]
    sha256: str | None = None
    published: bool = False
    bounds: Bounds | None = None

    @staticmethod
    def of(artifact: Artifact, sha256: str, name: str | None = None, published: bool = True) -> "Candidate":
        """Return the candidate of a loaded artifact."""
        name, bounds = name or artifact.recipe.name, bounds_in(artifact.fit)
        return Candidate(name, artifact.recipe, artifact.tensors, sha256, published, bounds)

    @staticmethod
    def unfitted(recipe: Recipe, files: ModelFiles) -> "Candidate":
        """Return the candidate of a recipe without a fit; of its tensors a model has the biases of keys."""
        suited = key_bias.centred(recipe, files.key_biases)
        return Candidate(recipe.name, suited, key_bias.tensors(suited, files.geometry, files.key_biases))

    @property
    def identity(self) -> list[Any]:
        """All that its measurements depend on, as JSON, without its name."""
        return [self.sha256, self.recipe.to_json()]


def find(given: str, files: ModelFiles, registry_url: str | None = None) -> Candidate:
    """Find an unfitted recipe, as `recipe_text.read` takes it, or an artifact by its reference or path.

    Raises NotFound for a fitted recipe without an artifact and for an unknown reference, ArtifactError for the artifact
    of another model.
    """
    known = recipe_text.read(given) if recipe_text.is_recipe(given) else None
    if known is not None and not known.fitted:
        return Candidate.unfitted(known, files)
    try:
        resolved = (
            registry.resolve(given, registry_url) if known is None else registry.resolve_name(known.name, registry_url)
        )
    except registry.NotFound as error:
        if known is None:
            raise
        text = f"recipe {known.name} has fitted stages, and no artifact has that name: {error}"
        raise registry.NotFound(text) from None
    artifact = load(resolved.path, resolved.sha256, resolved.size)
    fingerprint.check_match(artifact.fingerprint, files.fingerprint())
    return Candidate.of(artifact, resolved.sha256, given, published=bool(resolved.version))


def keep(candidate: Candidate, record: Mapping[str, Any], registry_url: str | None = None) -> None:
    """Store a record in the registry that holds the artifact; do nothing for any other candidate."""
    if not candidate.published:
        return
    name = reference.parse(candidate.name)
    assert isinstance(name, reference.Reference), "an artifact of a registry is named by a reference"
    registry.open_registry(name.registry or registry_url).add_evaluation(record, name.name)


def choose(asked: Sequence[str], files: ModelFiles) -> tuple[list[Recipe], list[str]]:
    """Return the recipes to compare, and why others are left out.

    asked   texts for `recipe_text.read`, each suited to the model; ["all"]; or none: the families' own choices
    """

    def suited(recipe: Recipe) -> Recipe:
        return plan.check(recipe.check(files.geometry), files)

    if asked and list(asked) != ["all"]:
        return recipe_text.distinct(suited(recipe_text.read(text)) for text in asked), []
    known = presets()
    default = [name for family in families().values() for name in family.compared]
    chosen, notes = [], []
    for name in known if asked else default:
        try:
            chosen.append(suited(known[name]))
        except ValueError as error:
            notes.append(f"{name} is left out: {error}")
    return chosen, notes


def costs(recipe: Recipe, geometry: Geometry, sliding: Sliding, length: int) -> dict[str, Any]:
    """Compute bits per element: asymptotic, and of caches that hold `length` and 4096 tokens; bytes of the latter.

    Every byte that a cache holds counts, computed from shapes, sliding layers included. A dynamic window is billed at
    its longest.
    """
    sizes = Sizes(recipe, geometry, sliding=sliding)
    here, there = sizes.at(length), sizes.at(TOKENS)
    return {
        "asymptotic": asymptotic_bits(recipe, geometry),
        "at_length": here.bits_per_element,
        f"at_{TOKENS}": there.bits_per_element,
        f"all_at_{TOKENS}": there.all_bits,
        f"bytes_at_{TOKENS}": there.total_bytes,
        f"exact_bytes_at_{TOKENS}": there.exact_bytes,
        "shared_bytes": there.shared_bytes,
    }
