"""Choose the number of the next version.

PATCH   a recalibration: the same recipe and provenance, except for model id, revision and environment
MINOR   another setting, or another corpus or choice of it
MAJOR   another schema, or a model with another fingerprint
"""

from typing import Literal

from kvq_runtime.artifact import fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.reference import order

FIRST = "1.0.0"
_NOT_SETTINGS = {"model", "revision", "environment"}


def highest(state: State) -> Version | None:
    """The version with the highest number, yanked or not: numbers are never reused."""
    return max(state.versions.values(), key=lambda version: order(version.version), default=None)


def following(version: str, old: Artifact, new: Artifact) -> str:
    """The number of `new`, which follows `version`, the number of `old`."""
    major, minor, patch = order(version)
    match changed(old, new):
        case "major":
            return f"{major + 1}.0.0"
        case "minor":
            return f"{major}.{minor + 1}.0"
        case "patch":
            return f"{major}.{minor}.{patch + 1}"


def changed(old: Artifact, new: Artifact) -> Literal["major", "minor", "patch"]:
    """Return the part of the version that changes from `old` to `new`."""
    distances = fingerprint.distances(old.fingerprint, new.fingerprint).values()
    other_model = fingerprint.mismatches(old.fingerprint, new.fingerprint) or any(
        distance > fingerprint.TOLERANCE for distance in distances
    )
    if old.schema != new.schema or other_model:
        return "major"
    settings = [{k: v for k, v in artifact.provenance.items() if k not in _NOT_SETTINGS} for artifact in (old, new)]
    if old.recipe != new.recipe or settings[0] != settings[1]:
        return "minor"
    return "patch"
