"""A registry in a folder, and the name in it that tests speak of."""

from pathlib import Path

import tiny_artifact as tiny

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.registry import Registry

NAME = "tiny-2bit"


def event_files(store: LocalRegistry, name: str = NAME) -> list[Path]:
    return sorted(store.events_folder(name).iterdir())


def three(store: LocalRegistry) -> LocalRegistry:
    """The registry with the versions 1.0.0, 1.0.1 and 1.0.2."""
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    return store


def damage(registry: Registry) -> dict[str, list[str]]:
    """{name, or name and version: errors} of all that cannot be read in a registry: events, files and records."""
    errors: dict[str, list[str]] = {}

    def attempt(place: str, action, *arguments):
        try:
            return action(*arguments)
        except ArtifactError as error:
            errors.setdefault(place, []).append(str(error))

    for name in registry.names():
        state = attempt(name, registry.state, name)
        for version in state.versions.values() if state else ():
            place, digest = f"{name} {version.version}", version.sha256
            path = attempt(place, registry.fetch, name, version)
            attempt(place, artifact.load, path, digest, version.size) if path else None
            attempt(place, registry.attachments, name, version)
            attempt(place, registry.evaluations, digest, name)
            attempt(place, registry.signatures, digest, name)
    return errors
