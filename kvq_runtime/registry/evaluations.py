"""Keep what was measured of an artifact after its fit: immutable records beside it.

    {"artifact": sha256, "corpus": digest, "protocol": {...}, "environment": {...}, "result": {...}}

A record's file is named by its own digest. The same measurement, stored twice, is one record.
"""

from collections.abc import Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime import files, reference, strict_json
from kvq_runtime.errors import ArtifactError

FIELDS = {"artifact", "corpus", "protocol", "environment", "result"}
LIMIT = 1 << 20


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """The record's file; ArtifactError if it is not one."""
    return (strict_json.dumps(_check(dict(record), "evaluation")) + "\n").encode()


def read(path: Path) -> dict[str, Any]:
    """Read a record, which must belong to the artifact its folder is named by, or raise an ArtifactError."""
    return from_bytes(files.read(path, LIMIT), path)


def from_bytes(data: bytes, path: PurePath) -> dict[str, Any]:
    """`read` for bytes at hand; `path` is where they were, artifact's digest / record's digest.json."""
    found = hash_of(data).hexdigest()
    if path.stem != found:
        raise ArtifactError(f"{path}: evaluation: sha256 is {found}, the name says otherwise; it was changed")
    record = _check(strict_json.loads(data, f"{path}: evaluation"), f"{path}: evaluation")
    if record["artifact"] != path.parent.name:
        raise ArtifactError(f"{path}: evaluation: is about {record['artifact']}, and lies with another artifact")
    return record


def _check(record: Any, what: str) -> dict[str, Any]:
    strict_json.keys(record, FIELDS, what)
    try:
        reference.check_sha256(record["artifact"])
        if not isinstance(record["corpus"], str):
            raise ValueError("corpus must be the digest of the text, as text")
        for name in ("protocol", "environment", "result"):
            if not isinstance(record[name], dict):
                raise ValueError(f"{name} must be an object")
    except ValueError as error:
        raise ArtifactError(f"{what}: {error}") from None
    return record
