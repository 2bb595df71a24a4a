"""Sign a version with a key, and demand a signature before a version is loaded. Needs the extra `sign`; works offline.

What is signed is a statement, {"name", "version", "sha256"}: bytes alone could be served under another name, or an old
version as a new one. The signature is a sigstore bundle made by `model_signing` with an elliptic-curve key (PEM); no
certificate, no log and no service is asked. A registry keeps it beside the artifact:

    signatures/<sha256>/<sha256 of file>.json      {"name", "version", "sha256", "bundle"}

A policy, in a lock file, is {"key": public key in PEM, "lowest": "1.2.0" or "", "follow": true or false}.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvq_runtime import reference, strict_json
from kvq_runtime.errors import ArtifactError

_FIELDS = {"name", "version", "sha256", "bundle"}


def sign(name: str, version: str, sha256: str, key: Path, password: str | None = None) -> bytes:
    """The record that a registry keeps; ValueError for a file that is no private key."""
    signing, _ = _library()
    with TemporaryDirectory() as folder:
        stated, made = _state(Path(folder), name, version, sha256), Path(folder) / "bundle.json"
        try:
            signing.Config().use_elliptic_key_signer(private_key=key, password=password).sign(stated, made)
        except (OSError, TypeError, ValueError) as error:
            text = f"key {key}: {error}; an elliptic-curve private key in PEM is meant (docs/consume.md makes one)"
            raise ValueError(text) from None
        bundle = json.loads(made.read_bytes())
    record = {"name": name, "version": version, "sha256": sha256, "bundle": bundle}
    return (strict_json.dumps(record) + "\n").encode()


def find(records: Iterable[bytes], name: str, version: str, sha256: str, key: str) -> dict[str, Any]:
    """The first record that is this key's signature of exactly this; ArtifactError says why there is none."""
    why = "there is none"
    for data in records:
        try:
            record = read(data)
            verify(record, name, version, sha256, key)
            return record
        except ArtifactError as error:
            why = str(error).removeprefix("signature: ")
    raise ArtifactError(
        f"signature: {name} {version}, sha256 {sha256[:12]}..., has no valid one of the key that is asked for ({why}); "
        "do not use it, ask who publishes it to run kvq sign"
    )


def read(data: bytes) -> dict[str, Any]:
    """A record from a registry."""
    return strict_json.keys(strict_json.loads(data, "signature", depth=32), _FIELDS, "signature")


def verify(record: Mapping[str, Any], name: str, version: str, sha256: str, key: str) -> None:
    """ArtifactError unless the record is a signature of this name, version and digest by the key (public, PEM)."""
    stated = (record["name"], record["version"], record["sha256"])
    if stated != (name, version, sha256):
        raise ArtifactError(f"signature: is of {stated[0]!r:.100} {stated[1]!r:.20}, sha256 {stated[2]!r:.14}...")
    _, verifying = _library()
    with TemporaryDirectory() as folder:
        statement, bundle, public = _state(Path(folder), name, version, sha256), Path(folder) / "b", Path(folder) / "k"
        bundle.write_text(json.dumps(record["bundle"]))
        public.write_text(key)
        try:
            verifier = verifying.Config().use_elliptic_key_verifier(public_key=public)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"key: no elliptic-curve public key in PEM: {error}") from None
        try:
            verifier.verify(statement, bundle)
        except Exception as error:  # whatever a bundle that somebody made up sets off, it is not a signature
            raise ArtifactError(f"signature: {' '.join(str(error).split())[:200]}") from None


def enforce(
    policy: Mapping[str, Any], records: Iterable[bytes], name: str, version: str, sha256: str
) -> dict[str, Any]:
    """The signature that a policy accepts for this version, or an ArtifactError."""
    if policy["lowest"] and reference.order(version) < reference.order(policy["lowest"]):
        raise ArtifactError(
            f"policy: {name} {version} is older than {policy['lowest']}, the lowest that the lock file allows; if "
            "going back is meant, pull again with another --lowest"
        )
    return find(records, name, version, sha256, policy["key"])


def _state(folder: Path, name: str, version: str, sha256: str) -> Path:
    place = folder / "statement"
    place.mkdir()
    text = strict_json.dumps({"name": name, "version": version, "sha256": sha256})
    (place / "statement.json").write_text(text)
    return place


def _library() -> tuple[Any, Any]:
    try:
        from model_signing import signing, verifying
    except ModuleNotFoundError as error:
        raise RuntimeError(f"signatures need {error.name}: pip install 'kvq-runtime[sign]'") from None
    return signing, verifying
