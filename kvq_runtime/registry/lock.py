"""Pin what a reference resolved to by a lock file, and sign versions with a key.

Signatures need the extra `sign`, and are made and verified offline.

A lock file is one JSON object with the fields of `Lock`, one a line, so that a change of it can be reviewed; the
optional ones are left out if they are empty. White space is of no meaning: files of one line are read as well.

The signed statement is {"name", "version", "sha256", "files"}, the last the digest of the files beside the artifact
(`events.Version.beside`). A signature of the bytes alone would hold under another name, or of an old version offered as
a new one. It is a sigstore bundle made by `model_signing` with an elliptic-curve key (PEM), without certificates,
transparency log or service. A registry keeps it as a record:

    signatures/<sha256>/<sha256 of file>.json      {"name", "version", "sha256", "files", "bundle"}

A policy, in a lock file, is {"key": public key in PEM, "lowest": "1.2.0" or "", "follow": true or false}: versions
below `lowest` are refused; with `follow` the lock does not pin a version, but demands a signature of any.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound, check_type, extra, spoken
from kvq_runtime.registry.reference import check_commit, check_name, check_sha256, check_version, order

LIMIT = 1 << 16  # bytes
_POLICY = {"key", "lowest", "follow"}
_SIGNATURE = {"name", "version", "sha256", "files", "bundle"}
_OPTIONAL = {"commit", "policy", "signature"}


@dataclass(frozen=True)
class Lock:
    """The result of resolving a reference at a pull: one file, pinned by its digest.

    reference   as the user wrote it
    registry    its address
    files       the digest of the files beside it, as `events.Version.beside`
    commit      of a Hub, in which the registry was read; else ""
    policy      demands on the file beside its digest, and whether the reference is followed
    signature   the signature that the policy accepted, so that a pinned file is checked offline
    """

    reference: str
    registry: str
    name: str
    version: str
    sha256: str
    size: int
    files: str
    commit: str = ""
    policy: Mapping[str, Any] | None = None
    signature: Mapping[str, Any] | None = None


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file, whole or not at all."""
    fields = {name: value for name, value in asdict(lock).items() if value or name not in _OPTIONAL}
    files.save(path, (json.dumps(fields, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def read_lock(path: Path | str) -> Lock:
    """Read a lock file; raises NotFound, or ArtifactError naming what is wrong in it."""
    check_type("lock", path, (str, Path), "the path of a file that kvq pull --lock wrote")
    label = f"lock: {path}"
    try:
        data = files.read(Path(path), LIMIT)
    except NotFound:
        raise NotFound(f"{label}: no such file; kvq pull REFERENCE --lock {path} writes it") from None
    fields = strict_json.loads(data, label, depth=32)
    strict_json.keys(fields, Lock.__dataclass_fields__.keys() - _OPTIONAL, label, _OPTIONAL)
    lock = Lock(**fields)
    try:
        _check(lock)
    except ValueError as error:
        raise ArtifactError(f"{label}: {error}; pull again") from None
    return lock


def _check(lock: Lock) -> None:
    check_name(lock.name)
    check_version(lock.version)
    check_sha256(lock.sha256)
    if type(lock.size) is not int or not isinstance(lock.reference, str) or not isinstance(lock.registry, str):
        raise ValueError("size must be a whole number, reference and registry text")
    if lock.commit != "":
        check_commit(lock.commit)
    check_sha256(lock.files)
    if lock.policy is None:
        return
    strict_json.keys(lock.policy, _POLICY, "policy")
    if not isinstance(lock.policy["key"], str) or not isinstance(lock.policy["follow"], bool):
        raise ValueError("policy: key must be a public key in PEM, follow true or false")
    if lock.policy["lowest"] != "":
        check_version(lock.policy["lowest"])
    if lock.signature is not None and not isinstance(lock.signature, dict):
        raise ValueError("signature must be an object")


# ---- signatures ------------------------------------------------------------------------------------------------------


def sign(name: str, version: str, sha256: str, files: str, key: Path, password: str | None = None) -> bytes:
    """The signature record of a version.

    files      the digest of the files beside it
    key        file of the private key, PEM
    password   of the key, if it is encrypted
    Raises ValueError if the file is no elliptic-curve private key, RuntimeError without the extra `sign`.
    """
    signing, _ = _library()
    stated = {"name": name, "version": version, "sha256": sha256, "files": files}
    with TemporaryDirectory() as folder:
        statement, bundle_path = _write_statement(Path(folder), stated), Path(folder) / "bundle.json"
        try:
            secret = None if password is None else password.encode()
            signing.Config().use_elliptic_key_signer(private_key=key, password=secret).sign(statement, bundle_path)
        except FileNotFoundError:
            raise NotFound(f"key {key}: no such file; docs/consume.md shows how to make one") from None
        except (OSError, TypeError, ValueError, AttributeError) as error:  # of an RSA key it asks for the curve
            why = spoken(error) if isinstance(error, OSError) else f"{key}: {_why(error, password)}"
            raise ValueError(f"key {why} (docs/consume.md shows how to make one)") from None
        bundle = json.loads(bundle_path.read_bytes())
    return strict_json.record(stated | {"bundle": bundle})


def _why(error: Exception, password: str | None) -> str:
    """The reason why a key was not read: a TypeError is of a password that is missing, or not wanted."""
    if isinstance(error, TypeError):
        return "is encrypted: set KVQ_KEY_PASSWORD" if password is None else "is not encrypted: unset KVQ_KEY_PASSWORD"
    return "no elliptic-curve private key in PEM" + ("" if password is None else " that KVQ_KEY_PASSWORD opens")


def find_signature(records: Iterable[bytes], name: str, version: str, sha256: str, key: str) -> dict[str, Any]:
    """The first record that is this key's signature of this name, version and digest; else ArtifactError."""
    why = "there is no signature"
    for data in records:
        try:
            record = read_signature(data)
            verify(record, name, version, sha256, key)
            return record
        except ArtifactError as error:
            why = str(error).removeprefix("signature: ")
    raise ArtifactError(
        f"signature: {name} {version}, sha256 {sha256[:12]}..., has no valid signature of the required key ({why}); "
        "do not use it, ask its publisher to run kvq sign"
    )


def read_signature(data: bytes) -> dict[str, Any]:
    """Parse a signature record from a registry; raises ArtifactError if it is malformed."""
    return strict_json.keys(strict_json.loads(data, "signature", depth=32), _SIGNATURE, "signature")


def verify(record: Mapping[str, Any], name: str, version: str, sha256: str, key: str) -> None:
    """Raise ArtifactError unless the record is a signature of this name, version and digest by the key.

    key   public key, the text of its PEM file; ValueError if it is none
    """
    signed = (record["name"], record["version"], record["sha256"])
    if signed != (name, version, sha256):
        raise ArtifactError(f"signature: is of {signed[0]!r:.100} {signed[1]!r:.20}, sha256 {signed[2]!r:.14}...")
    _, verifying = _library()
    with TemporaryDirectory() as folder:
        stated = {name: value for name, value in record.items() if name != "bundle"}
        statement, bundle, public = _write_statement(Path(folder), stated), Path(folder) / "b", Path(folder) / "k"
        bundle.write_text(json.dumps(record["bundle"]))
        public.write_text(key)
        try:
            verifier = verifying.Config().use_elliptic_key_verifier(public_key=public)
        except (TypeError, ValueError, AttributeError):
            raise ValueError(
                "key: no elliptic-curve public key in PEM; docs/consume.md shows how to make one"
            ) from None
        try:
            verifier.verify(statement, bundle)
        except Exception as error:  # a forged bundle may raise anything inside the library
            raise ArtifactError(f"signature: {' '.join(str(error).split())[:200]}") from None


def enforce(
    policy: Mapping[str, Any], records: Iterable[bytes], name: str, version: str, sha256: str
) -> dict[str, Any]:
    """The signature record that satisfies a policy for this version; else ArtifactError."""
    if policy["lowest"] and order(version) < order(policy["lowest"]):
        raise ArtifactError(
            f"policy: {name} {version} is older than {policy['lowest']}, the lowest that the lock file allows; to "
            "go back on purpose, pull again with another --lowest"
        )
    return find_signature(records, name, version, sha256, policy["key"])


def _write_statement(folder: Path, stated: Mapping[str, Any]) -> Path:
    """A folder with the signed statement as its only file."""
    statement = folder / "statement"
    statement.mkdir()
    (statement / "statement.json").write_text(strict_json.dumps(dict(stated)))
    return statement


def _library() -> tuple[Any, Any]:
    """model_signing's modules `signing` and `verifying`."""
    try:
        from model_signing import signing, verifying
    except ModuleNotFoundError as error:
        raise RuntimeError(f"signatures need {error.name}; {extra('sign')}") from None
    return signing, verifying
