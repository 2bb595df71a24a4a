"""A pull that ends between its file and its lock: the old lock refuses the new file, and says what to do."""

import pytest
import tiny_artifact as tiny
from local_store import NAME

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import faults
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import resolve
from kvq_runtime.registry.local import LocalRegistry


def test_the_lock_is_written_last_and_tells_of_a_file_that_is_newer(tmp_path, kvq, monkeypatch):
    store, out, lock = LocalRegistry(tmp_path / "registry"), tmp_path / "out", tmp_path / "kvq.lock"
    given = ("pull", NAME, "-o", out, "--lock", lock, "--registry", store.url)
    store.publish(NAME, tiny.data(0))
    assert kvq(*given)[0] == 0
    before, passed = lock.read_bytes(), []
    store.publish(NAME, tiny.data(1))

    def stop(name: str) -> None:
        passed.append(name)
        if passed.count("draft.begun") == 2:  # the file is there, and the lock is about to be
            raise OSError("no power")

    with monkeypatch.context() as patched:
        patched.setattr(faults, "point", stop)
        assert kvq(*given)[0] == 1
    file = out / "kvq.safetensors"
    assert file.read_bytes() == tiny.data(1) and lock.read_bytes() == before
    with pytest.raises(ArtifactError, match=f"interrupted leaves the new file beside .* pull again with --lock {lock}"):
        resolve.load_artifact(file, lock=lock)
    assert artifact.to_bytes(resolve.load_artifact(NAME, store.url, lock)) == tiny.data(0)  # by name: what is pinned
    assert kvq("pull", NAME, "-o", out, "--locked", lock, "--registry", store.url)[0] == 0
    assert artifact.to_bytes(resolve.load_artifact(file, lock=lock)) == tiny.data(0)
    assert kvq(*given)[0] == 0
    assert artifact.to_bytes(resolve.load_artifact(file, lock=lock)) == tiny.data(1)
