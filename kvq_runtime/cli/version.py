"""The commands about single versions: show, compare, fetch, check and sign them."""

import dataclasses
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_runtime.artifact import artifact, describe
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.header import CHECKS
from kvq_runtime.cli import options
from kvq_runtime.cli.names import target
from kvq_runtime.cli.table import percent, print_record, print_table, printable
from kvq_runtime.disk import files
from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import lock, rating, reference
from kvq_runtime.registry.evaluation_records import (
    PROTOCOLS,
    SPOKEN,
    TextRecord,
    readable,
)
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.resolve import Resolved, open_registry, resolve, resolve_name

DETAIL = re.compile(r"^(path|files|fingerprint|provenance\.environment)\b|_digest$|_sha256$|block_error|mean_energy")
SOURCE = 24  # characters of a text's name


def run_show(args: Namespace) -> int:
    """Print what one version is and loses, within 100 columns; with --verbose all of its facts but the evaluations'."""
    resolved, loaded = _load(args.reference, args)
    record, lead, records = _fields(resolved), [f"{resolved.name} {resolved.version}".rstrip()], list[TextRecord]()
    if resolved.registry:
        registry = open_registry(resolved.registry)
        state = registry.existing(resolved.name)
        version = state.get(resolved.version)
        aliases = [alias for alias in state.aliases if state.at(alias) == resolved.version]
        record |= {"published": version.at, "aliases": aliases, "files": dict(version.files)}
        record["evaluations"] = registry.evaluations(version.sha256, resolved.name)
        records = readable(record["evaluations"])
        lead += [str(rating.rate_records(records, version.about["corpus"])), *aliases]
        lead += [] if version.yanked is None else [f"yanked: {version.yanked}"]
    record |= describe.artifact_record(loaded)
    if args.json:
        print_record(record | {"settings": loaded.recipe.to_json()}, json=True)
        return 0
    print(printable("; ".join([lead[0], f"{record['recipe']['bits']:.3g} bits", *lead[1:]])) + "\n")
    layers = record["fit"].pop("layers", [])
    facts = flatten({name: value for name, value in record.items() if name != "evaluations" and value != {}})
    fit = [{"layer": i} | flatten(layer) for i, layer in enumerate(layers)] if isinstance(layers, list) else []
    if not args.verbose:
        facts, *fit = ({name: row[name] for name in row if not DETAIL.search(name)} for row in (facts, *fit))
    print_record(facts, json=False)
    tables = {"evaluations (--json has all, and tasks)": losses(records), "fit, by layer": fit}
    for title, rows in tables.items():
        if rows:
            print(f"\n{title}")
            print_table(rows, json=False)
    return 0


def _load(text: str, args: Namespace) -> tuple[Resolved, Artifact]:
    """Resolve a reference, and load its artifact with every check."""
    resolved = resolve(text, args.registry, getattr(args, "lock", None))
    return resolved, artifact.load(resolved.path, resolved.sha256, resolved.size)


def losses(records: Sequence[TextRecord]) -> list[dict[str, Any]]:
    """Return a row for each measured protocol of each record."""
    rows = []
    for record in records:
        about, source = record.protocol, record.protocol.text.source
        text = source if len(source) <= SOURCE else f"...{source[3 - SOURCE :]}"
        row = {"text": text, "windows": about.windows, "length": about.length}
        for protocol in PROTOCOLS:
            if (figures := record.figures(protocol)) is not None:
                row |= {"protocol": SPOKEN[protocol], "perplexity": figures.perplexity}
                row |= {"vs 16 bit": percent(figures.relative), "KL": figures.kl}
                rows.append(row | {"top-1": None if figures.top1 is None else f"{figures.top1:.2%}"})
    return rows


def run_pull(args: Namespace) -> int:
    """Copy a version and the files beside it into a folder, checked; --lock pins it, --locked copies the pinned one.

    No file is replaced that belongs to no version of this name.
    """
    options.check_output("-o", args.output, folder=True)
    if args.lock and (args.output is None or Path(args.output).absolute() not in Path(args.lock).absolute().parents):
        options.check_output("--lock", args.lock)
    key = _public_key(args.key) if args.key else _locked_key(args.lock)
    locked = lock.read_lock(args.locked) if args.locked else None
    resolved = resolve_name(args.reference, args.registry, args.locked)
    if not resolved.registry:
        raise ValueError(f"{args.reference} is a file already; pull copies a name from a registry")
    registry = open_registry(resolved.registry)
    state = registry.existing(resolved.name)
    version = state.get(resolved.version)
    _warn_if_yanked(resolved := dataclasses.replace(resolved, yanked=version.yanked))
    signature = None
    if key:
        records = registry.signatures(resolved.sha256, resolved.name)
        signature = lock.find_signature(records, resolved.name, resolved.version, resolved.sha256, key)
    _check_files(resolved, version, locked, signature)
    attachments = registry.attachments(resolved.name, version)
    data = artifact.read(resolved.path, resolved.sha256, resolved.size)
    folder = Path(args.output or resolved.name)
    contents = {reference.ARTIFACT_FILE: data} | attachments
    published = {entry["sha256"] for known in state.versions.values() for entry in known.files.values()}
    foreign = [name for name in attachments if not _may_replace(folder / name, published)]
    if foreign:
        raise ArtifactError(f"{folder}: {', '.join(foreign)}: not of {resolved.name}; use another -o")
    files.make_folder(folder)
    for name, content in contents.items():
        files.save(folder / name, content)
    if args.lock:
        fields = {name: getattr(resolved, name) for name in ("name", "version", "sha256", "size")}
        fields |= {"files": version.beside, "key": key, "signature": signature}
        lock.write_lock(Path(args.lock), Lock(args.reference, resolved.registry, **fields))
    paths = [str(folder / name) for name in contents]
    print_record(_fields(resolved) | {"files": paths, "lock": args.lock}, args.json)
    return 0


def _may_replace(path: Path, published: set[str]) -> bool:
    """Return True if a file does not exist, or has one of these digests."""
    try:
        return files.digest(path)[0] in published
    except NotFound:
        return True
    except ArtifactError:  # a link, a folder
        return False


def _warn_if_yanked(resolved: Resolved) -> None:
    if resolved.yanked is not None:
        warnings.warn(f"{resolved.name} {resolved.version} is yanked: {resolved.yanked}", stacklevel=3)


def _fields(resolved: Resolved) -> dict[str, Any]:
    """Return a resolved reference as fields."""
    return dataclasses.asdict(resolved) | {"path": str(resolved.path)}


def run_verify(args: Namespace) -> int:
    """Load an artifact with every check, and print which were made."""
    resolved, _ = _load(args.reference, args)
    _warn_if_yanked(resolved)
    stated = bool(args.lock or resolved.registry)  # size and digest of a path alone are compared with nothing
    checks = [check for check in CHECKS if stated or check not in ("size", "sha256")] + ["lock"] * bool(args.lock)
    print_record(_fields(resolved) | {"passed": checks}, args.json)
    return 0


# ---- signatures ------------------------------------------------------------------------------------------------------


def run_sign(args: Namespace) -> int:
    """Sign a version, and store the signature in its registry."""
    registry, name, version = target(args, "sign")
    key, password = Path(args.key), os.environ.get("KVQ_KEY_PASSWORD")
    data = lock.sign(name, version.version, version.sha256, version.beside, key, password)
    digest = registry.add_record("signatures", version.sha256, data, name)
    record = {"name": name, "version": version.version, "sha256": version.sha256, "signature": digest}
    print_record(record, args.json)
    return 0


def _public_key(path: str) -> str:
    """Read a public key's PEM file; raise ValueError if it is none."""
    text = files.read(Path(path), 1 << 16).decode(errors="replace")
    if "PUBLIC KEY" not in text:
        raise ValueError(f"key {path}: not a public key in PEM; docs/consume.md shows how to make one")
    return text


def _locked_key(path: str | None) -> str:
    """Return the public key that a lock file requires already, "" for none and without a file."""
    return lock.read_lock(path).key if path and Path(path).exists() else ""


def _check_files(
    resolved: Resolved, version: Version, locked: Lock | None, signature: Mapping[str, Any] | None
) -> None:
    """Raise ArtifactError if a lock file or a signature covers other files beside a version than the registry has.

    locked      the lock file that pins what to pull
    signature   that of the required key
    """
    stated = [] if locked is None else [locked.files]
    stated += [signed["files"] for signed in (signature, locked and locked.signature) if signed]
    if any(digest != version.beside for digest in stated):
        raise ArtifactError(
            f"files: {resolved.registry} has other files beside {resolved.name} {resolved.version} than lock file or "
            "signature say; nothing was written, ask its publisher"
        )
