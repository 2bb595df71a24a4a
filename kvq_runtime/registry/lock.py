"""Read and write lock files: what a reference resolved to, pinned by digest, and what is demanded of it.

A lock file is one JSON object with the fields of `Lock`, one a line, so that a change of it can be reviewed; the
optional ones are left out if they are empty. White space is of no meaning: files of one line are read as well.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry.reference import check_name, check_sha256, check_version

LIMIT = 1 << 16  # bytes
_POLICY = {"key", "lowest", "follow"}
_OPTIONAL = {"commit", "policy", "signature", "files"}
_COMMIT = re.compile(r"([0-9a-f]{40})?")


@dataclass(frozen=True)
class Lock:
    """The result of resolving a reference at a pull: one file, pinned by its digest.

    reference   as the user wrote it
    registry    its address
    commit      of a Hub, in which the registry was read; else ""
    policy      demands on the file beside its digest, and whether the reference is followed: see `signing`
    signature   the signature that the policy accepted, so that a pinned file is checked offline
    files       the digest of the files beside it, as `events.Version.beside`; "" in locks that pin none
    """

    reference: str
    registry: str
    name: str
    version: str
    sha256: str
    size: int
    commit: str = ""
    policy: Mapping[str, Any] | None = None
    signature: Mapping[str, Any] | None = None
    files: str = ""


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file, whole or not at all."""
    fields = {name: value for name, value in asdict(lock).items() if value or name not in _OPTIONAL}
    files.save(path, (json.dumps(fields, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def read_lock(path: Path | str) -> Lock:
    """Read a lock file; raises NotFound, or ArtifactError naming what is wrong in it."""
    label = f"lock: {path}"
    try:
        data = files.read(Path(path), LIMIT)
    except NotFound:
        raise NotFound(f"{label}: no such file; kvq pull REFERENCE --lock {path} writes it") from None
    fields = strict_json.loads(data, label, depth=32)
    present = _OPTIONAL & set(fields) if isinstance(fields, dict) else set()
    strict_json.keys(fields, set(Lock.__dataclass_fields__) - _OPTIONAL | present, label)
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
    if not isinstance(lock.commit, str) or not _COMMIT.fullmatch(lock.commit):
        raise ValueError(f"commit {lock.commit!r:.80}; use 40 digits of 0-9 a-f")
    if lock.files != "":
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
