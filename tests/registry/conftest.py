"""Every kind of registry, empty; and no artifact in memory, whatever another test of the process still holds."""

from weakref import WeakValueDictionary

import pytest
import tiny_artifact as tiny
from local_store import NAME

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
def store(any_registry: Registry, monkeypatch) -> Registry:
    """A registry with two versions, of each kind, the first one production; the default registry of the commands."""
    monkeypatch.setenv("KVQ_REGISTRY", any_registry.url)
    for seed in range(2):
        any_registry.publish(NAME, tiny.data(seed), attachments={"README.md": b"---\ntags: [kvq]\n---\n"})
    any_registry.promote(NAME, "1.0.0")
    return any_registry


@pytest.fixture
def folder(tmp_path, monkeypatch) -> LocalRegistry:
    """One in a folder, with one version of that name."""
    found = LocalRegistry(tmp_path / "registry")
    found.publish(NAME, tiny.data())
    return found


@pytest.fixture
def folder_registry(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


@pytest.fixture
def hub_registry(hub) -> Registry:
    return resolve.open_registry("hf://org")
