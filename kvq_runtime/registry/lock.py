"""Pin a resolved reference by a lock file, and sign versions with a key.

A lock file is one JSON object with the fields of `Lock`, one a line, for review of its changes; empty optional ones are
left out.

Signatures need the extra `sign`, and are made and verified offline. The signed statement is {"name", "version",
"sha256", "files"}, the last being `events.Version.beside`: a signature of the bytes alone would also hold under another
name, or for an old version offered as a new one. It is a sigstore bundle that `model_signing` makes with an
elliptic-curve key (PEM), without certificates, transparency log or service. A registry keeps it as a record:

    signatures/<sha256>/<sha256 of file>.json      {"name", "version", "sha256", "files", "bundle"}
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound, check_type, extra
from kvq_runtime.registry.reference import check_name, check_sha256, check_version

LIMIT = 1 << 16  # bytes
_OPTIONAL = {"key", "signature"}
_CHECKS = {"name": check_name, "version": check_version, "sha256": check_sha256, "files": check_sha256}
_TYPES = {"reference": str, "registry": str, "size": int, "key": str, "signature": dict}
_SIGNED = {"name", "version", "sha256", "files"}  # the fields of a statement
_HOW = "docs/consume.md shows how to make one"


@dataclass(frozen=True)
class Lock:
    """The result of resolving a reference at a pull: one file, pinned by its digest.

    reference   as the user wrote it
    registry    its address
    files       `events.Version.beside`
    key         public key in PEM, whose signature is required
    signature   that signature, so that a pinned file is checked offline
    """

    reference: str
    registry: str
    name: str
    version: str
    sha256: str
    size: int
    files: str
    key: str = ""
    signature: Mapping[str, Any] | None = None


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file, whole or not at all."""
    fields = {name: value for name, value in asdict(lock).items() if value or name not in _OPTIONAL}
    files.save(path, (json.dumps(fields, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def read_lock(path: Path | str) -> Lock:
    """Read a lock file; raises NotFound, or ArtifactError naming the fault."""
    check_type("lock", path, (str, Path), "the path of a file that kvq pull --lock wrote")
    label = f"lock: {path}"
    try:
        data = files.read(Path(path), LIMIT)
    except NotFound:
        raise NotFound(f"{label}: no such file; kvq pull REFERENCE --lock {path} writes it") from None
    fields = strict_json.loads(data, label, depth=32)
    strict_json.keys(fields, Lock.__dataclass_fields__.keys() - _OPTIONAL, label, _OPTIONAL, _CHECKS)
    for name, kind in _TYPES.items():
        if type(fields.get(name, kind())) is not kind:
            raise ArtifactError(f"{label}: {name} {fields[name]!r:.80}; expected {kind.__name__}; pull again")
    return Lock(**fields)


# ---- signatures ------------------------------------------------------------------------------------------------------


def sign(name: str, version: str, sha256: str, files: str, key: Path, password: str | None = None) -> bytes:
    """Return the signature record of a version.

    files      `events.Version.beside`
    key        file of the private key, PEM
    password   of the key, if it is encrypted
    Raises ValueError if the file is no elliptic-curve private key, RuntimeError without the extra `sign`.
    """
    signing, _ = _library()
    stated = {"name": name, "version": version, "sha256": sha256, "files": files}
    with TemporaryDirectory() as folder:
        statement, bundle = _write_statement(Path(folder), stated), Path(folder) / "bundle.json"
        try:
            secret = None if password is None else password.encode()
            signing.Config().use_elliptic_key_signer(private_key=key, password=secret).sign(statement, bundle)
        except FileNotFoundError:
            raise NotFound(f"key {key}: no such file; {_HOW}") from None
        except (TypeError, ValueError, AttributeError):  # the last of an RSA key, which has no curve
            text = (
                "no elliptic-curve private key in PEM that KVQ_KEY_PASSWORD opens; set that for an encrypted key alone"
            )
            raise ValueError(f"key {key}: {text}; {_HOW}") from None
        return strict_json.record(stated | {"bundle": json.loads(bundle.read_bytes())})


def find_signature(records: Iterable[bytes], name: str, version: str, sha256: str, key: str) -> dict[str, Any]:
    """Return the first record that is this key's signature of name, version and digest; else ArtifactError."""
    reason = "there is no signature"
    for data in records:
        try:
            record = strict_json.keys(strict_json.loads(data, "signature", depth=32), _SIGNED | {"bundle"}, "signature")
            verify(record, name, version, sha256, key)
            return record
        except ArtifactError as error:
            reason = str(error).removeprefix("signature: ")
    raise ArtifactError(
        f"signature: {name} {version}, sha256 {sha256[:12]}..., has no valid signature of the required key ({reason}); "
        "do not use it, ask its publisher to run kvq sign"
    )


def verify(record: Mapping[str, Any], name: str, version: str, sha256: str, key: str) -> None:
    """Raise ArtifactError unless the record is a signature of name, version and digest by the key.

    key   public key, the text of its PEM file; ValueError if it is none
    """
    signed = (record["name"], record["version"], record["sha256"])
    if signed != (name, version, sha256):
        raise ArtifactError(f"signature: is of {signed[0]!r:.100} {signed[1]!r:.20}, sha256 {signed[2]!r:.14}...")
    _, verifying = _library()
    with TemporaryDirectory() as folder:
        statement = _write_statement(Path(folder), {field: record[field] for field in _SIGNED})
        bundle, public = Path(folder) / "bundle.json", Path(folder) / "key.pem"
        bundle.write_text(json.dumps(record["bundle"]))
        public.write_text(key)
        try:
            verifier = verifying.Config().use_elliptic_key_verifier(public_key=public)
        except (TypeError, ValueError, AttributeError):
            raise ValueError(f"key: no elliptic-curve public key in PEM; {_HOW}") from None
        try:
            verifier.verify(statement, bundle)
        except Exception as error:  # a forged bundle may raise anything inside the library
            raise ArtifactError(f"signature: {' '.join(str(error).split())[:200]}") from None


def _write_statement(folder: Path, stated: Mapping[str, Any]) -> Path:
    """Write the signed statement as the only file of a folder, and return that folder."""
    statement = folder / "statement"
    statement.mkdir()
    (statement / "statement.json").write_text(strict_json.dumps(dict(stated)))
    return statement


def _library() -> tuple[Any, Any]:
    """Return model_signing's modules `signing` and `verifying`."""
    try:
        from model_signing import signing, verifying
    except ModuleNotFoundError as error:
        raise RuntimeError(f"signatures need {error.name}; {extra('sign')}") from None
    return signing, verifying
