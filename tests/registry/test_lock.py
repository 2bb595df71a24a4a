"""A lock pins one file and what stands beside it; a signature is of one name, version and digest, by one key."""

import json

import pytest
import tiny_artifact as tiny
from local_store import NAME

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import Lock, find_signature, read_lock, sign, verify, write_lock

pytest.importorskip("model_signing")
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from key_pair import keys

CARD = {"README.md": b"# card\n", "error.png": b"png"}
BESIDE = "b" * 64  # a digest of files beside an artifact


@pytest.fixture
def store(tmp_path, monkeypatch) -> LocalRegistry:
    """The default registry, with three versions."""
    store = LocalRegistry(tmp_path / "registry")
    monkeypatch.setenv("KVQ_REGISTRY", store.url)
    for seed in range(3):
        store.publish(NAME, tiny.data(seed), attachments=CARD)
    return store


# ---- locks


def test_a_lock_pins_what_the_reference_meant(store, tmp_path):
    found, lock = resolve.resolve(NAME, store.url), tmp_path / "kvq.lock"
    write_lock(lock, Lock(NAME, store.url, NAME, found.version, found.sha256, found.size, BESIDE))
    assert set(json.loads(lock.read_text())) == {"reference", "registry", "name", "version", "sha256", "size", "files"}
    store.promote(NAME, "1.0.0", force=True)
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


LOCK = {"reference": NAME, "registry": "file:///x", "name": NAME, "version": "1.0.0", "sha256": "a" * 64, "size": 1}
LOCK["files"] = BESIDE


@pytest.mark.parametrize(
    "change, message",
    [({"name": "../x"}, "name '../x'"), ({"sha256": "../" + "a" * 61}, "sha256 '../"), ({"size": "1"}, "size '1'"),
     ({"version": "latest"}, "version 'latest'"), ({"command": "rm"}, r"unknown keys \['command'\]"),
     ({"key": 1}, "key 1; expected str"), ({"signature": []}, "expected dict")],
)  # fmt: skip
def test_a_strange_lock_is_refused(change, message, tmp_path):
    path = tmp_path / "kvq.lock"
    path.write_text(strict_json.dumps(LOCK | change))
    with pytest.raises(ArtifactError, match=f"lock: {path}: .*{message}"):
        read_lock(path)


def edited(store: LocalRegistry, change, number: int = 3) -> None:
    """Let an event name other files, as whoever may write to a registry can."""
    path = store.events_folder(NAME) / f"{number:08}.json"
    event = json.loads(path.read_text())
    change(event["files"])
    path.chmod(0o644)
    path.write_text(strict_json.dumps(event) + "\n")


def one_more(store: LocalRegistry):
    return lambda files: files.update({"more.png": {"sha256": store.put_blob(b"theirs\n"), "size": 7}})


def test_a_lock_pins_what_stands_beside_the_artifact(store, kvq, tmp_path):
    lock, mirror = tmp_path / "kvq.lock", (tmp_path / "mirror").as_uri()
    assert kvq("pull", NAME, "-o", tmp_path / "out", "--lock", lock)[0] == 0
    assert kvq("copy", NAME, mirror)[0] == 0  # its card is another
    assert kvq("pull", NAME, "-o", tmp_path / "same", "--locked", lock, "--registry", mirror)[0] == 0
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == sorted([*CARD, "kvq.safetensors"])
    edited(store, one_more(store))
    code, _, error = kvq("pull", NAME, "-o", tmp_path / "late", "--locked", lock)
    assert code == 1 and "has other files beside" in error and not (tmp_path / "late").exists()


def test_the_lock_is_written_last_and_tells_of_a_file_that_is_newer(store, tmp_path, kvq, monkeypatch):
    out, lock = tmp_path / "out", tmp_path / "kvq.lock"
    given = ("pull", NAME, "-o", out, "--lock", lock)
    assert kvq(*given)[0] == 0
    before, saved = lock.read_bytes(), files.save
    store.publish(NAME, tiny.data(3))

    def stop(path, data) -> None:
        if path == lock:
            raise OSError("no power")
        saved(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(files, "save", stop)
        assert kvq(*given)[0] == 1
    file = out / "kvq.safetensors"
    assert file.read_bytes() == tiny.data(3) and lock.read_bytes() == before
    with pytest.raises(ArtifactError, match=f"interrupted leaves the new file beside .* pull again with --lock {lock}"):
        resolve.load_artifact(file, lock=lock)
    assert kvq("pull", NAME, "-o", out, "--locked", lock)[0] == 0
    assert artifact.to_bytes(resolve.load_artifact(file, lock=lock)) == tiny.data(2)


# ---- signatures


def test_a_pull_with_a_key_needs_its_signature_which_a_copy_brings(store, kvq, tmp_path):
    (mine, public), (_, other) = keys(tmp_path, "mine"), keys(tmp_path, "other")
    pull = ("pull", f"{NAME}@1.0.0", "-o", tmp_path / "out", "--key")
    code, _, error = kvq(*pull, public)
    assert code == 1 and "there is no signature" in error and "kvq sign" in error and not (tmp_path / "out").exists()
    assert kvq("sign", f"{NAME}@1.0.0", "--key", mine)[0] == 0
    assert kvq(*pull, public)[0] == 0
    code, _, error = kvq(*pull, other)
    assert code == 1 and "does not match the provided public key" in error
    assert kvq("pull", f"{NAME}@1.0.1", "-o", tmp_path / "out", "--key", public)[0] == 1
    assert kvq("sign", NAME, "--key", mine)[0] == 2  # which version?
    mirror = (tmp_path / "mirror").as_uri()
    assert kvq("copy", f"{NAME}@1.0.0", mirror)[0] == 0
    assert kvq(*pull, public, "--registry", mirror)[0] == 0


def test_keys_of_other_kinds_and_passwords_are_refused_by_name(tmp_path):
    right = (NAME, "1.0.0", "a" * 64)
    private, public = keys(tmp_path, "closed", "right")
    record = json.loads(sign(*right, BESIDE, private, "right"))
    verify(record, *right, public.read_text())
    for password, key in ((None, private), ("right", keys(tmp_path, "open")[0])):
        with pytest.raises(ValueError, match="that KVQ_KEY_PASSWORD opens"):
            sign(*right, BESIDE, key, password)
    with pytest.raises(ValueError, match="that KVQ_KEY_PASSWORD opens"):
        sign(*right, BESIDE, private, "wrong")
    made = rsa.generate_private_key(65537, 2048)
    (other := tmp_path / "other.pem").write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ValueError, match="no elliptic-curve private key in PEM"):
        sign(*right, BESIDE, other)
    text = made.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    with pytest.raises(ValueError, match="no elliptic-curve public key in PEM; docs"):
        verify(record, *right, text)


def test_a_signature_is_of_nothing_else(tmp_path):
    private, public = keys(tmp_path, "mine")
    right = (NAME, "1.0.0", "a" * 64)
    good = sign(*right, BESIDE, private)
    record = json.loads(good)
    for wrong in (("other", "1.0.0", "a" * 64), (NAME, "1.0.1", "a" * 64), (NAME, "1.0.0", "b" * 64)):
        renamed = record | dict(zip(("name", "version", "sha256"), wrong, strict=True))
        for given in (record, renamed):
            with pytest.raises(ArtifactError, match="signature: "):
                verify(given, *wrong, public.read_text())
    for junk in (b"", b"[]", b'{"name":1}', strict_json.dumps(record | {"bundle": {"mediaType": "x"}}).encode()):
        with pytest.raises(ArtifactError, match="has no valid signature"):
            find_signature([junk], *right, public.read_text())
        assert find_signature([junk, good], *right, public.read_text()) == record


def test_a_forged_bundle_is_refused(tmp_path):
    """Of another key, with parts of the right one; of the right key, with parts of another; of no signature."""
    (mine, public), (theirs, _) = keys(tmp_path, "mine"), keys(tmp_path, "theirs")
    right = (NAME, "1.0.0", "a" * 64)
    good, evil = (json.loads(sign(*right, BESIDE, key))["bundle"] for key in (mine, theirs))
    other = json.loads(sign(NAME, "1.0.1", "b" * 64, BESIDE, mine))["bundle"]
    envelope, material = good["dsseEnvelope"], "verificationMaterial"
    stolen = evil["dsseEnvelope"]
    forged = [evil, evil | {material: good[material]}, good | {"dsseEnvelope": stolen}, {}, {material: good[material]}]
    forged += [
        good | {"dsseEnvelope": envelope | change}
        for change in (
            {"signatures": []}, {"signatures": [{"sig": ""}]}, {"signatures": stolen["signatures"]},
            {"signatures": [{"sig": "MAYCAQACAQA="}]},  # r = s = 0
            {"payload": other["dsseEnvelope"]["payload"]}, {"payload": ""}, {"payloadType": "text/plain"},
        )
    ]  # fmt: skip
    stated = {"name": NAME, "version": "1.0.0", "sha256": "a" * 64, "files": BESIDE}
    for bundle in (*forged, other):
        with pytest.raises(ArtifactError, match="signature: "):
            verify(stated | {"bundle": bundle}, *right, public.read_text())
    with pytest.raises(ArtifactError, match="signature: "):  # of the files beside it
        verify(stated | {"bundle": good, "files": "c" * 64}, *right, public.read_text())
    verify(stated | {"bundle": good}, *right, public.read_text())


def test_a_lock_holds_the_signature_that_it_requires(store, kvq, tmp_path):
    (mine, public), (_, other) = keys(tmp_path, "mine"), keys(tmp_path, "other")
    kvq("sign", f"{NAME}@1.0.1", "--key", mine)
    lock, pull = tmp_path / "kvq.lock", ("pull", f"{NAME}@1.0.1", "-o", tmp_path / "out", "--lock")
    assert kvq(*pull, lock, "--key", public)[0] == 0 and kvq(*pull, lock)[0] == 0
    resolve.load_artifact(tmp_path / "out" / "kvq.safetensors", lock=lock)
    kept = json.loads(lock.read_text())
    assert kept["key"] == public.read_text()
    for change in ({"key": other.read_text()}, {"signature": {}}, {"version": "1.0.2"}, {"sha256": "a" * 64}):
        lock.write_text(json.dumps(kept | change))
        for reference in (f"{NAME}@1.0.1", tmp_path / "out" / "kvq.safetensors"):
            with pytest.raises(ArtifactError, match="has no valid signature"):
                resolve.resolve(reference, lock=lock)
    lock.write_text(json.dumps({name: value for name, value in kept.items() if name != "signature"}))
    with pytest.raises(ArtifactError, match="has no valid signature"):
        resolve.resolve(f"{NAME}@1.0.1", lock=lock)
    lock.write_text(json.dumps(kept))
    edited(store, one_more(store), 2)
    for given in (("--locked", lock), ("--lock", tmp_path / "new.lock", "--key", public)):
        code, _, error = kvq("pull", f"{NAME}@1.0.1", "-o", tmp_path / "late", *given)
        assert code == 1 and "has other files beside" in error and not (tmp_path / "late").exists()
