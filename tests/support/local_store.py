"""A registry in a folder, and the name in it that tests speak of."""

from pathlib import Path

import tiny_artifact as tiny

from kvq_runtime.registry import resolve
from kvq_runtime.registry.local import LocalRegistry

NAME = "tiny-2bit"


def event_files(store: LocalRegistry, name: str = NAME) -> list[Path]:
    return sorted(store.events_folder(name).iterdir())


def three(store: LocalRegistry) -> LocalRegistry:
    """The registry with the versions 1.0.0, 1.0.1 and 1.0.2."""
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    return store


def production() -> str:
    """What a cache that is made now is made of."""
    return resolve.resolve(f"{NAME}@production").version
