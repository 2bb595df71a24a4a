"""Every kind of registry, empty; and no artifact in memory, whatever another test of the process still holds."""

from collections.abc import Iterator
from weakref import WeakValueDictionary

import pytest
import tiny_artifact as tiny
from local_store import NAME

from kvq_runtime.artifact import artifact
from kvq_runtime.registry import bucket, resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.registry import Registry


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch):
    monkeypatch.setattr(artifact, "_loaded", WeakValueDictionary())


@pytest.fixture(params=["folder", "hub", "bucket"])
def any_registry(request: pytest.FixtureRequest) -> Registry:
    """A registry of each kind; a test is skipped where what that needs is not here."""
    return request.getfixturevalue(f"{request.param}_registry")


@pytest.fixture
def store(any_registry: Registry, monkeypatch) -> Registry:
    """A registry with two versions, of each kind, the first one production; the default registry of the commands."""
    monkeypatch.setenv("KVQ_USER", "alice")
    monkeypatch.setenv("KVQ_REGISTRY", any_registry.url)
    for seed in range(2):
        any_registry.publish(NAME, tiny.data(seed), attachments={"README.md": b"---\ntags: [kvq]\n---\n"})
    any_registry.promote(NAME, "1.0.0")
    return any_registry


@pytest.fixture
def folder(tmp_path, monkeypatch) -> LocalRegistry:
    """One in a folder, with one version of that name."""
    monkeypatch.setenv("KVQ_USER", "alice")
    found = LocalRegistry(tmp_path / "registry")
    found.publish(NAME, tiny.data())
    return found


@pytest.fixture
def folder_registry(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


@pytest.fixture
def hub_registry(hub) -> Registry:
    return resolve.open_registry("hf://org")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The address of moto's S3."""
    pytest.importorskip("s3fs", reason="s3fs and moto are in an environment of their own: make test-bucket")
    server = pytest.importorskip("moto.server", reason="s3fs and moto are in one of their own: make test-bucket")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def system(s3_address: str, monkeypatch: pytest.MonkeyPatch):
    """The bucket "models", as s3fs sees it."""
    import s3fs

    given = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "ENDPOINT_URL": s3_address, "DEFAULT_REGION": "us-east-1"}
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket._systems.clear()
    made = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    made.mkdir("models")
    yield made
    made.rm("models", recursive=True)
    bucket._systems.clear()


@pytest.fixture
def bucket_registry(system) -> Registry:
    return resolve.open_registry("s3://models/kvq")
