"""Names, references, addresses and locks: nothing else is one, and what is not touches nothing."""

import pytest
import tiny_artifact as tiny
from local_store import NAME, three

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import reference, resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import Lock, read_lock, write_lock


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


CLIMBING = [
    "../x",
    "..",
    "a/../../b",
    "/etc/passwd",
    "a/b",
    "",
    ".hidden",
    "A",
    "a\n",
    "a\0",
    "é",
    "x" * 97,
    "a.safetensors",
]


@pytest.mark.parametrize("name", CLIMBING)
def test_a_name_that_is_none_touches_nothing(name, store):
    for action in (
        lambda: store.publish(name, tiny.data()),
        lambda: store.state(name),
        lambda: store.promote(name, "1.0.0"),
        lambda: store.yank(name, "1.0.0", "x"),
    ):
        with pytest.raises(ValueError, match="name "):
            action()
    if not name.endswith(".safetensors"):
        with pytest.raises(ValueError, match="name "):
            resolve.resolve(name, store.url)
    assert not store.root.exists()


@pytest.mark.parametrize(
    "given", ["a@", "a@1.0", "a@01.0.0", "a@../b", "a@sha256:12", "a@Production", "a@1.0.0\n", "a@b@c"]
)
def test_a_reference_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=r"; use "):
        reference.parse(given)


@pytest.mark.parametrize("name", ["../README.md", "a/b", "", ".x", "kvq.safetensors"])
def test_files_beside_a_version_stay_beside_it(name, store):
    with pytest.raises(ValueError, match="file name"):
        store.publish(NAME, tiny.data(), attachments={name: b""})
    assert not store.root.exists()


def test_registry_addresses(tmp_path, monkeypatch):
    assert resolve.open_registry(None).root == tmp_path / "kvq-home" / "registry"
    assert resolve.open_registry(f"file://{tmp_path}/a%20b").root == tmp_path / "a b"
    assert resolve.open_registry(str(tmp_path)).root == tmp_path
    monkeypatch.setenv("KVQ_REGISTRY", f"file://{tmp_path}/other")
    assert resolve.open_registry().root == tmp_path / "other"
    assert resolve.open_registry("hf://org").url == resolve.open_registry("hf://org/").url == "hf://org"
    for url in ("hf://", "hf://a/b", "hf://../x"):
        with pytest.raises(ValueError, match="organization"):
            resolve.open_registry(url)
    for url in ("https://example.org/x", "file://host/x"):
        with pytest.raises(ValueError, match="use file:///folder"):
            resolve.open_registry(url)


# ---- locks


def test_a_lock_pins_what_the_reference_meant(store, tmp_path):
    three(store)
    found = resolve.resolve(NAME, store.url)
    lock = tmp_path / "kvq.lock"
    write_lock(lock, Lock(NAME, store.url, NAME, found.version, found.sha256, found.size, "b" * 64))
    store.promote(NAME, "1.0.0")
    assert resolve.resolve(NAME, store.url).version == "1.0.0"
    pinned = resolve.resolve(NAME, lock=lock)  # the registry is the lock's, too
    assert (pinned.version, pinned.sha256, pinned.chosen_because) == ("1.0.2", found.sha256, f"pinned by {lock}")
    with pytest.raises(ArtifactError, match=f"lock: .* pins {NAME}, not {NAME}@1.0.0"):
        resolve.resolve(f"{NAME}@1.0.0", store.url, lock)
    copy = tmp_path / "kvq.safetensors"
    copy.write_bytes(tiny.data(2))
    resolve.load_artifact(copy, lock=lock)
    copy.write_bytes(tiny.data(1))
    with pytest.raises(ArtifactError, match=r"lock: .*kvq\.safetensors has sha256 .* pins"):
        resolve.load_artifact(copy, lock=lock)
    with pytest.raises(NotFound, match=r"no such file; kvq pull REFERENCE --lock"):
        resolve.resolve(NAME, lock=tmp_path / "none.lock")


def test_a_registry_that_has_the_locked_bytes_under_another_number_is_refused(store, tmp_path):
    """Who deploys 1.0.2 must not get what the registry calls 1.0.0, the same bytes or not."""
    first = store.publish(NAME, tiny.data())
    lock = tmp_path / "kvq.lock"
    write_lock(lock, Lock(NAME, store.url, NAME, "1.0.2", first.sha256, first.size, "b" * 64))
    with pytest.raises(ArtifactError, match=f"{lock} pins version 1.0.2, but the registry has these bytes as 1.0.0"):
        resolve.resolve(NAME, lock=lock)
    copy = tmp_path / "kvq.safetensors"  # a file has no number
    copy.write_bytes(tiny.data())
    assert resolve.resolve(copy, lock=lock).sha256 == first.sha256


LOCK = {"reference": NAME, "registry": "file:///x", "name": NAME, "version": "1.0.0", "sha256": "a" * 64, "size": 1,
        "files": "b" * 64}  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "../x"}, "name '../x'"),
        ({"sha256": "../" + "a" * 61}, "sha256 '../"),
        ({"version": "latest"}, "version 'latest'"),
        ({"size": "1"}, "size must be a whole number"),
        ({"command": "rm"}, r"unknown keys \['command'\]"),
    ],
)
def test_a_strange_lock_is_refused(change, message, tmp_path):
    path = tmp_path / "kvq.lock"
    path.write_text(strict_json.dumps(LOCK | change))
    with pytest.raises(ArtifactError, match=f"lock: {path}: .*{message}"):
        read_lock(path)


@pytest.mark.parametrize("given", ["a@sha256:12", f"a@sha256:{'0' * 65}", f"a@{'0' * 64}", f"a@{'a' * 64}",
                                   "a@0123abcd", f"a@SHA256:{'0' * 64}", f"a@sha256:{'A' * 64}"])  # fmt: skip
def test_a_digest_that_is_none_is_answered_with_what_one_looks_like(given):
    with pytest.raises(ValueError, match="64 digits of 0-9 a-f"):
        reference.parse(given)
