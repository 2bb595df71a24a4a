"""Number the next version of a name, by what differs between its artifact and that of the highest version.

patch   a recalibration: the same recipe and provenance, except for model id, revision and environment
minor   another setting, or another corpus or choice of it
major   another schema, or a model with another fingerprint
"""

from collections.abc import Callable
from pathlib import Path

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import reference
from kvq_runtime.registry.events import State, Version

FIRST = "1.0.0"
_NOT_SETTINGS = {"model", "revision", "environment"}  # of a provenance: a recalibration may change these


def following(state: State, new: Artifact, fetch: Callable[[str, Version], Path]) -> str:
    """The number of `new`, which follows the highest version of a name, yanked or not: numbers are never reused.

    fetch   gets the file of that version
    """
    highest = max(state.versions.values(), key=lambda version: reference.order(version.version), default=None)
    if highest is None:
        return FIRST
    try:
        old = artifact.load(fetch(state.name, highest), highest.sha256, highest.size)
    except ArtifactError as error:
        text = f"{error}; it is needed to choose the number after {highest.version}: give one, --artifact-version"
        raise ArtifactError(text) from None
    major, minor, patch = reference.order(highest.version)
    distances = fingerprint.distances(old.fingerprint, new.fingerprint).values()
    other_model = fingerprint.mismatches(old.fingerprint, new.fingerprint) or any(
        distance > fingerprint.TOLERANCE for distance in distances
    )
    if old.schema != new.schema or other_model:
        return f"{major + 1}.0.0"
    settings = [{k: v for k, v in made.provenance.items() if k not in _NOT_SETTINGS} for made in (old, new)]
    if old.recipe != new.recipe or settings[0] != settings[1]:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}"
