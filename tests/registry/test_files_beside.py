"""What stands beside an artifact: names of a short list, pinned by a lock, covered by a signature, in nobody's way.
After a pull that ended between its file and its lock the old lock refuses the new file, and says what to do.
"""

import json

import pytest
import tiny_artifact as tiny
from local_store import NAME

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import events, resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import read_lock

CARD = {"README.md": b"# card\n", "error.png": b"png", "kvq_config.json": b"{}"}
NO_NAMES = [
    "conftest.py", "Makefile", "sitecustomize.py", "kvq.lock", "pyproject.toml", "package.json", "readme.md",
    "kvq.safetensorS", "a/b.png", "../a.png", ".a.png", "A.png", "a.png\n", "a.PNG", "x" * 95 + ".png", 7, "",
]  # fmt: skip


@pytest.fixture
def store(tmp_path, monkeypatch) -> LocalRegistry:
    store = LocalRegistry(tmp_path / "registry")
    monkeypatch.setenv("KVQ_REGISTRY", store.url)
    store.publish(NAME, tiny.data(0), attachments=CARD)
    return store


def edited(store: LocalRegistry, change) -> None:
    """Let the first event name other files, as whoever may write to a registry can."""
    path = store.events_folder(NAME) / "00000001.json"
    about = json.loads(path.read_text())
    change(about["files"])
    path.chmod(0o644)
    path.write_text(strict_json.dumps(about) + "\n")


def one_more(store: LocalRegistry, name: str = "more.png"):
    content = b"theirs\n"
    return lambda files: files.update({name: {"sha256": store.put_blob(content), "size": len(content)}})


@pytest.mark.parametrize("name", NO_NAMES)
def test_only_names_of_a_short_list_stand_beside_an_artifact(name, store, kvq, tmp_path):
    with pytest.raises(ValueError, match="file name .*use README.md, kvq_config.json, or a picture"):
        store.publish("other", tiny.data(1), attachments={name: b"theirs\n"})
    assert not (store.root / "names" / "other").exists()
    if isinstance(name, str):
        edited(store, one_more(store, name))
        assert kvq("pull", NAME, "-o", tmp_path / "out")[0] == 1 and not (tmp_path / "out").exists()


def test_a_file_beside_an_artifact_has_a_bound(store):
    edited(store, lambda files: files["error.png"].update(size=events.MAX_FILE + 1))
    with pytest.raises(ArtifactError, match="size .*whole number from 0 to 67108864"):
        store.state(NAME)


def test_a_lock_pins_what_stands_beside_the_artifact(store, kvq, tmp_path):
    out, lock = tmp_path / "out", tmp_path / "kvq.lock"
    assert kvq("pull", NAME, "-o", out, "--lock", lock)[0] == 0
    assert kvq("pull", NAME, "-o", tmp_path / "same", "--locked", lock)[0] == 0
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == sorted([*CARD, "kvq.safetensors"])
    edited(store, one_more(store))
    code, _, said = kvq("pull", NAME, "-o", tmp_path / "late", "--locked", lock)
    assert code == 1 and "has other files beside" in said and not (tmp_path / "late").exists()


def test_a_lock_holds_in_a_mirror_whose_card_is_another(store, kvq, tmp_path):
    lock, mirror = tmp_path / "kvq.lock", (tmp_path / "mirror").as_uri()
    assert kvq("pull", NAME, "-o", tmp_path / "out", "--lock", lock)[0] == 0
    assert kvq("copy", NAME, mirror)[0] == 0
    edited(LocalRegistry(tmp_path / "mirror"), lambda files: files["README.md"].update(files["error.png"]))
    assert kvq("pull", NAME, "-o", tmp_path / "there", "--locked", lock, "--registry", mirror)[0] == 0
    assert (tmp_path / "there" / "README.md").read_bytes() == b"png"


def test_a_pull_replaces_only_what_is_of_the_same_name(store, kvq, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_bytes(b"mine\n")
    (tmp_path / "elsewhere").write_bytes(b"mine too\n")
    (project / "error.png").symlink_to(tmp_path / "elsewhere")
    code, _, said = kvq("pull", NAME, "-o", project)
    assert code == 1 and "README.md, error.png: not of" in said and "--force" in said
    assert (project / "README.md").read_bytes() == b"mine\n" and not (project / "kvq.safetensors").exists()
    assert kvq("pull", NAME, "-o", project, "--force")[0] == 0
    assert {name: (project / name).read_bytes() for name in CARD} == CARD
    assert (tmp_path / "elsewhere").read_bytes() == b"mine too\n"
    store.publish(NAME, tiny.data(1), attachments={"README.md": b"# the next\n"})
    assert kvq("pull", NAME, "-o", project)[0] == 0  # over an earlier version's
    assert (project / "README.md").read_bytes() == b"# the next\n"


# ---- signatures and policies


@pytest.fixture
def signed(store, kvq, tmp_path):
    """The public key of a version's signature."""
    pytest.importorskip("model_signing")
    from key_pair import keys

    private, public = keys(tmp_path, "mine")
    assert kvq("sign", f"{NAME}@1.0.0", "--key", private)[0] == 0
    return public


@pytest.mark.parametrize("follow", [(), ("--follow",)], ids=["pinned", "followed"])
def test_a_signature_covers_what_stands_beside_the_artifact(follow, store, signed, kvq, tmp_path):
    lock = tmp_path / "kvq.lock"
    assert kvq("pull", NAME, "-o", tmp_path / "out", "--lock", lock, "--key", signed, *follow)[0] == 0
    assert kvq("pull", NAME, "-o", tmp_path / "same", "--locked", lock)[0] == 0
    assert (tmp_path / "same" / "error.png").exists()
    edited(store, one_more(store))
    for given in (("--locked", lock), ("--lock", tmp_path / "new.lock", "--key", signed)):
        code, _, said = kvq("pull", NAME, "-o", tmp_path / "late", *given)
        assert code == 1 and "has other files beside" in said and not (tmp_path / "late").exists()


def test_a_policy_stays_as_long_as_its_lock_file(store, signed, kvq, tmp_path):
    lock = tmp_path / "kvq.lock"
    given = ("pull", NAME, "-o", tmp_path / "out", "--lock", lock)
    assert kvq(*given, "--key", signed, "--lowest", "1.0.0")[0] == 0
    policy = read_lock(lock).policy
    assert policy is not None
    assert kvq(*given)[0] == 0 and read_lock(lock).policy == policy and read_lock(lock).signature
    store.publish(NAME, tiny.data(1))
    code, _, said = kvq(*given)
    assert code == 1 and "has no valid signature" in said and read_lock(lock).version == "1.0.0"
    lock.unlink()
    assert kvq(*given)[0] == 0 and read_lock(lock).policy is None
    assert read_lock(lock).version == "1.0.1"


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
        patched.setattr(files, "fault_point", stop)
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
