"""Read and write evaluation records: measurements of an artifact after its fit, stored beside it, never changed.

    {"artifact": sha256, "corpus": digest, "protocol": {...}, "environment": {...}, "result": {...}}

A record's file is named by its own digest. The same measurement, stored twice, is one record.
"""

from collections.abc import Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import reference

FIELDS = {"artifact", "corpus", "protocol", "environment", "result"}
LIMIT = 1 << 20


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """The record's file; raises ArtifactError if the record is malformed."""
    return (strict_json.dumps(_check(dict(record), "evaluation")) + "\n").encode()


def read(path: Path) -> dict[str, Any]:
    """Read a record; raises ArtifactError if it is damaged, or is not about the artifact its folder is named by."""
    return from_bytes(files.read(path, LIMIT), path)


def from_bytes(data: bytes, path: PurePath) -> dict[str, Any]:
    """`read` for bytes that are already read from `path`, .../artifact's digest/record's digest.json."""
    digest = hash_of(data).hexdigest()
    if path.stem != digest:
        raise ArtifactError(f"{path}: evaluation: sha256 is {digest}, not that of its name; the file was changed")
    record = _check(strict_json.loads(data, f"{path}: evaluation"), f"{path}: evaluation")
    if record["artifact"] != path.parent.name:
        raise ArtifactError(f"{path}: evaluation: is about {record['artifact']}, but stored with another artifact")
    return record


def _check(record: Any, label: str) -> dict[str, Any]:
    strict_json.keys(record, FIELDS, label)
    try:
        reference.check_sha256(record["artifact"])
        if not isinstance(record["corpus"], str):
            raise ValueError("corpus must be text: the digest of the corpus")
        for name in ("protocol", "environment", "result"):
            if not isinstance(record[name], dict):
                raise ValueError(f"{name} must be an object")
    except ValueError as error:
        raise ArtifactError(f"{label}: {error}") from None
    return record
