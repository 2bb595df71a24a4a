"""The commands about signatures: `kvq sign`, `kvq verify --key`, and the policy of `kvq pull --key`."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_runtime.cli.table import print_record
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import reference, signing
from kvq_runtime.registry.lock import Lock, read_lock
from kvq_runtime.registry.reference import Reference
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import Resolved, choose, open_registry


def sign(args: Namespace) -> int:
    """Sign a version, and store the signature in its registry."""
    target = reference.parse(args.reference)
    if not isinstance(target, Reference) or target.by == "default":
        raise ValueError(f"sign {args.reference}: name the version, as in sign NAME@1.2.0")
    registry = open_registry(target.registry or args.registry)
    version, _ = choose(registry.existing(target.name), target)
    password = os.environ.get("KVQ_KEY_PASSWORD")
    data = signing.sign(target.name, version.version, version.sha256, Path(args.key), password, version.beside)
    digest = registry.add_record("signatures", version.sha256, data, target.name)
    record = {"name": target.name, "version": version.version, "sha256": version.sha256, "signature": digest}
    print_record(record, args.json)
    return 0


def public_key(path: str) -> str:
    """The text of a public key's PEM file; ValueError if it is none."""
    text = files.read(Path(path), 1 << 16).decode(errors="replace")
    if "PUBLIC KEY" not in text:
        raise ValueError(f"key {path}: not a public key in PEM; docs/consume.md shows how to make one")
    return text


def policy(args: Namespace) -> dict[str, Any] | None:
    """The policy that `kvq pull --lock` writes into the lock file, as in `signing`: that of --key, else the one that
    the lock file has already; None where there is neither, or with --no-policy."""
    if args.key is None:
        kept = read_lock(args.lock).policy if args.lock and not args.no_policy and Path(args.lock).exists() else None
        if kept is not None:
            lowest = reference.check_version(args.lowest) if args.lowest else kept["lowest"]
            return {**kept, "lowest": lowest, "follow": args.follow or kept["follow"]}
        if args.lowest or args.follow:
            raise ValueError("--lowest and --follow need --key: they limit which signed versions are accepted")
        return None
    if args.lock is None:
        raise ValueError("--key needs --lock: the lock file keeps the key, and demands signatures whenever it is used")
    lowest = reference.check_version(args.lowest) if args.lowest else ""
    return {"key": public_key(args.key), "lowest": lowest, "follow": args.follow}


def accepted(registry: Registry, resolved: Resolved, policy: Mapping[str, Any]) -> dict[str, Any]:
    """The signature of a version that satisfies a policy; else ArtifactError."""
    records = registry.signatures(resolved.sha256, resolved.name)
    return signing.enforce(policy, records, resolved.name, resolved.version, resolved.sha256)


def covered(registry: Registry, resolved: Resolved, locked: Lock | None, signature: Mapping[str, Any] | None) -> bool:
    """True if lock and signature, where there are, cover the files beside a version, so that these may be written.

    locked      the lock file that pins what to pull
    signature   that the policy demands
    Raises ArtifactError where they are of other files.
    """
    stated = [] if locked is None or (locked.policy and locked.policy["follow"]) else [locked.files]
    if locked is not None and locked.policy is not None:
        followed = locked.policy["follow"]
        given = accepted(registry, resolved, locked.policy) if followed else locked.signature or {}
        stated.append(given.get("files", ""))
    if signature is not None:
        stated.append(signature.get("files", ""))
    version = registry.existing(resolved.name).get(resolved.version)
    if any(digest not in ("", version.beside) for digest in stated):
        raise ArtifactError(
            f"files: {resolved.registry} has other files beside {resolved.name} {resolved.version} than lock file or "
            "signature say; nothing was written, ask its publisher"
        )
    return "" not in stated


def check(resolved: Resolved, lock: str | None, key: str) -> None:
    """Raise ArtifactError unless the key has signed a version, or a file that is pinned by a lock file.

    lock   path of the lock file with the signature of a file that is not from a registry
    key    public key, PEM
    """
    if resolved.registry:
        records = open_registry(resolved.registry).signatures(resolved.sha256, resolved.name)
        signing.find(records, resolved.name, resolved.version, resolved.sha256, key)
        return
    pinned = read_lock(lock) if lock else None
    if pinned is None or pinned.signature is None:
        text = f"{resolved.path} is a path: use a reference, or a --lock that holds a signature"
        raise ArtifactError(f"signature: {text}")
    records = [strict_json.dumps(pinned.signature).encode()]
    signing.find(records, pinned.name, pinned.version, resolved.sha256, key)
