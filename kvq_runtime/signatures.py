"""What `kvq sign`, `kvq verify --key` and `kvq pull --key` do: signatures of versions, and policies of lock files."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_runtime import files, reference, strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.reference import Reference
from kvq_runtime.registries import signing
from kvq_runtime.registries.changes import Registry
from kvq_runtime.registry import Resolved, choose, open_registry
from kvq_runtime.table import print_record


def sign(args: Namespace) -> int:
    """Sign a version, and keep the signature beside it."""
    wanted = reference.parse(args.reference)
    if not isinstance(wanted, Reference) or wanted.by == "default":
        raise ValueError(f"sign {args.reference}: say which version, as in sign NAME@1.2.0")
    registry = open_registry(wanted.registry or args.registry)
    found, _ = choose(registry.existing(wanted.name), wanted)
    data = signing.sign(wanted.name, found.version, found.sha256, Path(args.key), os.environ.get("KVQ_KEY_PASSWORD"))
    digest = registry.add_record("signatures", found.sha256, data, wanted.name)
    about = {"name": wanted.name, "version": found.version, "sha256": found.sha256, "signature": digest}
    print_record(about, args.json)
    return 0


def public_key(path: str) -> str:
    """The text of a public key's file."""
    text = files.read(Path(path), 1 << 16).decode(errors="replace")
    if "PUBLIC KEY" not in text:
        raise ValueError(f"key {path}: no public key in PEM")
    return text


def policy(args: Namespace) -> dict[str, Any] | None:
    """What `kvq pull` is told to demand; None if nothing."""
    if args.key is None:
        if args.lowest or args.follow:
            raise ValueError("--lowest and --follow go with --key: they say which signed versions are accepted")
        return None
    if args.lock is None:
        raise ValueError("--key goes with --lock: the lock file is what demands signatures from then on")
    lowest = reference.check_version(args.lowest) if args.lowest else ""
    return {"key": public_key(args.key), "lowest": lowest, "follow": args.follow}


def accepted(registry: Registry, found: Resolved, demanded: Mapping[str, Any]) -> dict[str, Any]:
    """The signature of a version that a policy accepts."""
    records = registry.signatures(found.sha256, found.name)
    return signing.enforce(demanded, records, found.name, found.version, found.sha256)


def check(found: Resolved, lock: str | None, key: str) -> None:
    """ArtifactError unless a version, or the file that a lock pins, is signed by a key."""
    if found.registry:
        signing.find(open_registry(found.registry).signatures(found.sha256, found.name), found.name, found.version,
                     found.sha256, key)  # fmt: skip
        return
    pinned = reference.read_lock(lock) if lock else None
    if pinned is None or pinned.signature is None:
        raise ArtifactError(f"signature: {found.path} is a path: give a reference, or a --lock that holds a signature")
    own = strict_json.dumps(pinned.signature).encode()
    signing.find([own], pinned.name, pinned.version, found.sha256, key)
