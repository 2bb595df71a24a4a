"""A signature is of one name, one version and one digest, by one key; a lock file can demand it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_artifact as tiny
from hub_client import asked, hub_for

from kvq_runtime.cli import main as cli
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import Lock, find_signature, read_lock, read_signature, sign, verify, write_lock

pytest.importorskip("model_signing")
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from key_pair import keys

NAME = "tiny-2bit"


@pytest.fixture(params=["file", "hf"])
def store(request, tmp_path, monkeypatch):
    """A registry with three versions, of each kind; the default registry of the commands."""
    if request.param == "file":
        store = LocalRegistry(tmp_path / "registry")
        monkeypatch.setenv("KVQ_REGISTRY", store.url)
        for seed in range(3):
            store.publish(NAME, tiny.data(seed))
        yield store
        return
    with hub_for(monkeypatch, tmp_path):
        store = resolve.open_registry("hf://org")
        monkeypatch.setenv("KVQ_REGISTRY", store.url)
        for seed in range(3):
            store.publish(NAME, tiny.data(seed))
        yield store


@pytest.fixture
def kvq(capsys):
    def run(*given: object) -> tuple[int, str]:
        code = cli.main([str(argument) for argument in given])
        return code, capsys.readouterr().err

    return run


def test_sign_and_verify(store, kvq, tmp_path):
    (mine, public), (_, other) = keys(tmp_path, "mine"), keys(tmp_path, "other")
    code, err = kvq("verify", f"{NAME}@1.0.0", "--key", public)
    assert code == 1 and "has no valid signature" in err and "there is no signature" in err
    assert kvq("sign", f"{NAME}@1.0.0", "--key", mine) == (0, "")
    assert kvq("verify", f"{NAME}@1.0.0", "--key", public) == (0, "")
    code, err = kvq("verify", f"{NAME}@1.0.0", "--key", other)
    assert code == 1 and "does not match the provided public key" in err
    assert kvq("verify", f"{NAME}@1.0.1", "--key", public)[0] == 1
    assert kvq("sign", NAME, "--key", mine)[0] == 2  # which version?
    assert kvq("sign", f"{NAME}@1.0.0", "--key", public)[0] == 2
    assert kvq("verify", f"{NAME}@1.0.0", "--key", mine)[0] == 2
    (record,) = store.signatures(store.state(NAME).versions["1.0.0"].sha256, NAME)
    assert {"name", "version", "sha256", "files", "bundle"} == set(read_signature(record))


def test_keys_of_other_kinds_are_refused_by_name(tmp_path):
    right = (NAME, "1.0.0", "a" * 64)
    record = read_signature(sign(*right, "b" * 64, keys(tmp_path, "mine")[0]))
    for made in (rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate()):
        (private := tmp_path / "other.pem").write_bytes(
            made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        with pytest.raises(ValueError, match="no elliptic-curve private key in PEM"):
            sign(*right, "b" * 64, private)
        public = made.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        with pytest.raises(ValueError, match="no elliptic-curve public key in PEM; docs"):
            verify(record, *right, public)


def test_a_signature_is_of_nothing_else(tmp_path):
    private, public = keys(tmp_path, "mine")
    right = (NAME, "1.0.0", "a" * 64)
    record = read_signature(sign(*right, "b" * 64, private))
    verify(record, *right, public.read_text())
    for wrong in (("other", "1.0.0", "a" * 64), (NAME, "1.0.1", "a" * 64), (NAME, "1.0.0", "b" * 64)):
        with pytest.raises(ArtifactError, match="signature: is of"):
            verify(record, *wrong, public.read_text())
        renamed = record | dict(zip(("name", "version", "sha256"), wrong, strict=True))
        with pytest.raises(ArtifactError, match="signature: "):
            verify(renamed, *wrong, public.read_text())


@pytest.mark.parametrize("junk", [b"", b"[]", b'{"name":1}', None], ids=["empty", "list", "short", "bundle"])
def test_junk_beside_an_artifact_is_no_signature(junk, tmp_path):
    private, public = keys(tmp_path, "mine")
    right = (NAME, "1.0.0", "a" * 64)
    good = sign(*right, "b" * 64, private)
    if junk is None:
        junk = strict_json.dumps(read_signature(good) | {"bundle": {"mediaType": "x"}}).encode()
    with pytest.raises(ArtifactError, match="has no valid signature"):
        find_signature([junk], *right, public.read_text())
    assert find_signature([junk, good], *right, public.read_text()) == read_signature(good)


def test_a_lock_that_pins_holds_its_signature(store, kvq, tmp_path, monkeypatch):
    (mine, public), (_, other) = keys(tmp_path, "mine"), keys(tmp_path, "other")
    lock, given = tmp_path / "kvq.lock", (f"{NAME}@1.0.1", "-o", tmp_path / "out", "--key", public)
    code, err = kvq("pull", *given, "--lock", lock)
    assert code == 1 and "kvq sign" in err and not lock.exists() and not (tmp_path / "out").exists()
    kvq("sign", f"{NAME}@1.0.1", "--key", mine)
    assert kvq("pull", *given, "--lock", lock) == (0, "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve.resolve(f"{NAME}@1.0.1", lock=lock).version == "1.0.1"
    resolve.load_artifact(tmp_path / "out" / "kvq.safetensors", lock=lock)
    assert kvq("verify", tmp_path / "out" / "kvq.safetensors", "--lock", lock, "--key", public) == (0, "")
    kept = json.loads(lock.read_text())
    for change, says in (
        ({"policy": kept["policy"] | {"key": other.read_text()}}, "has no valid signature"),
        ({"policy": kept["policy"] | {"lowest": "1.0.2"}}, "older than 1.0.2"),
        ({"policy": kept["policy"] | {"lowest": "new"}}, "version 'new'"),
        ({"policy": {"key": 1}}, "missing keys"),
        ({"signature": None}, "has no valid signature"),
        ({"version": "1.0.2"}, "has no valid signature"),
    ):
        lock.write_text(json.dumps(kept | change))
        with pytest.raises(ArtifactError, match=says):
            resolve.resolve(f"{NAME}@1.0.1", lock=lock)
    assert kvq("pull", *given)[0] == 2 and kvq("pull", NAME, "--lowest", "1.0.0")[0] == 2


def test_a_lock_that_follows_an_alias_takes_only_what_is_signed_and_not_older(store, kvq, tmp_path):
    mine, public = keys(tmp_path, "mine")
    lock, alias = tmp_path / "kvq.lock", f"{NAME}@production"
    for version in ("1.0.0", "1.0.1"):
        kvq("sign", f"{NAME}@{version}", "--key", mine)
    store.promote(NAME, "1.0.1")
    demand = ("--key", public, "--lowest", "1.0.1", "--follow")
    assert kvq("pull", alias, "-o", tmp_path / "out", "--lock", lock, *demand) == (0, "")
    found = resolve.resolve(alias, lock=lock)
    assert found.version == "1.0.1" and "signed, as the lock file demands" in found.chosen_because
    store.promote(NAME, "1.0.2")
    with pytest.raises(ArtifactError, match=r"signature: tiny-2bit 1\.0\.2"):
        resolve.load_artifact(alias, lock=lock)
    kvq("sign", f"{NAME}@1.0.2", "--key", mine)
    assert resolve.resolve(alias, lock=lock).version == "1.0.2"
    store.promote(NAME, "1.0.0")  # signed, but old: what a stolen registry could serve
    with pytest.raises(ArtifactError, match=r"policy: tiny-2bit 1\.0\.0 is older than 1\.0\.1"):
        resolve.load_artifact(alias, lock=lock)
    with pytest.raises(ArtifactError, match="follows a reference"):
        resolve.load_artifact(tmp_path / "out" / "kvq.safetensors", lock=lock)


def test_a_followed_alias_is_checked_offline_too(kvq, tmp_path, monkeypatch):
    mine, public = keys(tmp_path, "mine")
    with hub_for(monkeypatch, tmp_path) as hub:
        store = resolve.open_registry("hf://org")
        store.publish(NAME, tiny.data())
        store.promote(NAME, "1.0.0")
        lock, alias = tmp_path / "kvq.lock", f"hf://org/{NAME}@production"
        kvq("sign", alias, "--key", mine)
        assert kvq("pull", alias, "-o", tmp_path / "out", "--lock", lock, "--key", public, "--follow") == (0, "")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        hub.requests.clear()
        assert resolve.resolve(alias, lock=lock).version == "1.0.0" and asked(hub) == []


def test_a_copy_keeps_its_signatures(store, kvq, tmp_path):
    mine, public = keys(tmp_path, "mine")
    kvq("sign", f"{NAME}@1.0.0", "--key", mine)
    mirror = f"file://{tmp_path}/mirror"
    assert kvq("copy", NAME, mirror)[0] == 0
    assert kvq("verify", f"{NAME}@1.0.0", "--registry", mirror, "--key", public) == (0, "")


def test_without_the_extra_a_demand_is_an_error_and_not_a_pass(tmp_path):
    root = Path(__file__).parents[2]
    body = """
import sys; sys.modules["model_signing"] = None
from kvq_runtime.registry.lock import verify
try:
    right = {"name": "a", "version": "1.0.0", "sha256": "a" * 64}
    verify({**right, "bundle": {}}, **right, key="k")
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "pip install -e '.[sign]'" in done.stdout, done.stderr


def test_locks_without_a_policy_are_as_they_were(tmp_path):
    lock = Lock(NAME, "file:///x", NAME, "1.0.0", "a" * 64, 1, "b" * 64)
    write_lock(tmp_path / "kvq.lock", lock)
    written = json.loads((tmp_path / "kvq.lock").read_text())
    assert set(written) == {"reference", "registry", "name", "version", "sha256", "size", "files"}
    assert read_lock(tmp_path / "kvq.lock") == lock


def test_an_encrypted_key_signs_with_its_password_alone(tmp_path):
    private, public = keys(tmp_path, "closed", "right")
    record = sign(NAME, "1.0.0", "0" * 64, "b" * 64, private, "right")
    verify(read_signature(record), NAME, "1.0.0", "0" * 64, public.read_text())
    with pytest.raises(ValueError, match="is encrypted: set KVQ_KEY_PASSWORD"):
        sign(NAME, "1.0.0", "0" * 64, "b" * 64, private)
    with pytest.raises(ValueError, match="that KVQ_KEY_PASSWORD opens"):
        sign(NAME, "1.0.0", "0" * 64, "b" * 64, private, "wrong")
    with pytest.raises(ValueError, match="is not encrypted: unset KVQ_KEY_PASSWORD"):
        sign(NAME, "1.0.0", "0" * 64, "b" * 64, keys(tmp_path, "open")[0], "right")
