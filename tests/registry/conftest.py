"""Every kind of registry, empty; and no artifact in memory, whatever another test of the process still holds."""

from weakref import WeakValueDictionary

import pytest

from kvq_runtime.artifact import artifact
from kvq_runtime.registry import resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.registry import Registry


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch):
    monkeypatch.setattr(artifact, "_loaded", WeakValueDictionary())


@pytest.fixture(params=["folder", "hub"])
def any_registry(request: pytest.FixtureRequest) -> Registry:
    """A registry of each kind."""
    return request.getfixturevalue(f"{request.param}_registry")


@pytest.fixture
def folder_registry(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


@pytest.fixture
def hub_registry(hub) -> Registry:
    return resolve.open_registry("hf://org")
