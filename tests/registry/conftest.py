"""Every kind of registry, empty; and no artifact in memory, whatever another test of the process still holds."""

import json
import subprocess
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import tiny_artifact as tiny
from local_store import NAME
from patience import PATIENCE
from webhook import free_port

from kvq_runtime.artifact import artifact
from kvq_runtime.registry import bucket, resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.oci.client import Repository
from kvq_runtime.registry.registry import Registry

PROGRAM = Path(__file__).parents[2] / "build" / "oci" / "usr" / "bin" / "docker-registry"


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch):
    monkeypatch.setattr(artifact, "_loaded", WeakValueDictionary())


@pytest.fixture(params=["folder", "hub", "bucket", "oci"])
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


@pytest.fixture(scope="session")
def oci_host(tmp_path_factory) -> Iterator[str]:
    """Host and port of Debian's docker-registry."""
    if not PROGRAM.exists():
        pytest.skip("docker-registry is not here: make test-oci")
    folder = tmp_path_factory.mktemp("oci")
    with free_port() as port:
        pass
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}}
    settings = {"version": 0.1, "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}, "log": {"level": "error"}}
    (folder / "config.yml").write_text(json.dumps(settings))
    running = subprocess.Popen([PROGRAM, "serve", folder / "config.yml"], stderr=subprocess.DEVNULL)
    address, until = f"localhost:{port}", time.monotonic() + PATIENCE
    while True:
        try:
            Repository(f"{address}/x").tags()
            break
        except RuntimeError:
            assert time.monotonic() < until and running.poll() is None, "docker-registry does not start"
            time.sleep(0.1)
    yield address
    running.terminate()
    running.wait(PATIENCE)


@pytest.fixture
def oci_registry(oci_host: str, request, tmp_path, monkeypatch) -> Registry:
    """A repository of the test's own."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("DOCKER_AUTH_CONFIG", raising=False)
    return resolve.open_registry(f"oci://{oci_host}/{sha256(request.node.nodeid.encode()).hexdigest()[:16]}/kvq")
