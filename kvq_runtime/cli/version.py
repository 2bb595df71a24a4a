"""The commands of one version, `kvq show`, `pull`, `verify` and `sign`: see, fetch, check and sign it."""

import dataclasses
import os
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_runtime.artifact.header import CHECKS
from kvq_runtime.cli import options
from kvq_runtime.cli.names import target
from kvq_runtime.cli.table import percent, print_record, print_table, printable
from kvq_runtime.disk import files, strict_json
from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import lock, rating, reference
from kvq_runtime.registry.evaluation_records import Record, TasksRecord, TextRecord, readable, task_records
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import Resolved, accepted, open_registry, resolve, resolve_name

MEANINGS = {  # of the checks, for people
    "header": "the file begins as a safetensors file, and is as long as it says",
    "size": "as many bytes as registry or lock file say",
    "sha256": "the bytes that registry or lock file name",
    "schema": "a version of the format that this program reads",
    "content": "digest of all tensors and settings, stored in the file itself",
    "recipe": "settings that fit together",
    "fingerprint": "the model it is for: shape, RoPE, a probe of its projections",
    "tensors": "each that the recipe needs, of its shape and dtype, and no other",
    "finite": "no NaN, no infinity and nothing beyond 2^20 in any of them",
    "lock": "all that the lock file pins or demands",
    "signature": "made with the key that was given",
}
FIGURES = {"relative": "relative", "kl": "kl", "decoded": "decoded.attention", "beyond": "beyond", "none": "reason"}
MEASURED = {  # {column of the table of evaluations: dotted key in the record's JSON, which `kvq show --json` prints}
    **{"model": "protocol.model.id", "text": "protocol.text.source", "windows": "protocol.windows"},
    **{"length": "protocol.length", "recent": "protocol.recent", "perplexity": "result.perplexity"},
    **{"relative": "result.relative", "kl": "result.kl", "top1": "result.top1"},  # of version 1, in use
    **{
        f"{protocol}: {name}": f"result.protocols.{protocol}.{key}"
        for protocol in ("full", "in-use")
        for name, key in FIGURES.items()  # {column: key within a protocol}
    },
}


def show(args: Namespace) -> int:
    """Print everything about one version, with its evaluations."""
    from kvq_runtime.artifact import artifact, describe

    resolved = resolve(args.reference, args.registry, args.lock)
    loaded = artifact.load(resolved.path, resolved.sha256, resolved.size)
    record: dict[str, Any] = _record(resolved)
    found_to_be, evaluations = [], []
    if resolved.registry:
        registry = open_registry(resolved.registry)
        state = registry.existing(resolved.name)
        version = state.get(resolved.version)
        record["published"] = version.at
        record["aliases"] = [alias for alias in state.aliases if state.at(alias) == resolved.version]
        record["files"] = dict(version.files)
        found_to_be = [str(rating.rate_version(registry, resolved.name, version)), *record["aliases"]]
        found_to_be += [] if version.yanked is None else [f"yanked: {version.yanked}"]
        found = registry.evaluations(resolved.sha256, resolved.name)
        evaluations = readable(found)
        record["evaluations"] = [one.raw for one in evaluations]
        if len(evaluations) < len(found):
            said = f"{len(found) - len(evaluations)} evaluations are of a form that is not read, and left out"
            warnings.warn(said, stacklevel=2)
    record |= describe.artifact_record(loaded) | ({"settings": loaded.recipe.to_json()} if args.json else {})
    if not args.json:
        lead = [f"{resolved.name} {resolved.version}".rstrip(), f"{record['recipe']['bits']:.3g} bits", *found_to_be]
        print(printable("; ".join(lead)) + "\n")
    print_record(record if args.json else describe.brief(record), args.json)
    for title, rows in ({} if args.json else evaluation_tables(evaluations) | describe.tables(record)).items():
        print(f"\n{title}")
        print_table([{name: _shown(name, value) for name, value in row.items()} for row in rows], json=False)
    return 0


def _shown(column: str, value: Any) -> Any:
    """A cell of the table of evaluations; shares in per cent, as in the tables of kvq eval."""
    what = column.rpartition(" ")[2]
    if not isinstance(value, float) or what not in ("relative", "top1", "decoded", "beyond"):
        return value
    return percent(value) if what == "relative" else f"{value:.2%}"


def evaluation_tables(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
    """{title: rows}: a row a text of a record, of tasks a row a protocol and task."""
    stated = [flatten(raw) for one in records if not isinstance(one, TasksRecord) for raw in _by_text(one)]
    measured = [{name: flat[key] for name, key in MEASURED.items() if key in flat} for flat in stated]
    answered = [row for one in task_records(records) for row in _answered(one)]
    titled = {"evaluations (--json has all of each)": measured, "tasks": answered}
    return {title: rows for title, rows in titled.items() if rows}


def _by_text(record: Record) -> list[dict[str, Any]]:
    """A record's JSON, and again with the figures of each text of another kind in place of the first one's."""
    raw, others = record.raw, record.elsewhere() if isinstance(record, TextRecord) else ()
    about, found = raw["protocol"], raw["result"]
    return [raw, *({"protocol": about | about["texts"][name], "result": found["texts"][name]} for name in others)]


def _answered(record: TasksRecord) -> list[dict[str, Any]]:
    """A row for each task and protocol: its figures by metric, and how many texts."""
    rows = []
    for protocol, part in record.result.protocols.items():
        for task, found in part.tasks.items():
            said = [f"{name} {one.value:.4g}" for name, one in found.figures.items() if one.value is not None]
            said += [] if found.reason is None else [found.reason]
            rows.append({"task": task, "protocol": protocol, "figures": ", ".join(said), "texts": found.texts})
    return rows


def pull(args: Namespace) -> int:
    """Copy a version and the files beside it into a folder, checked; --lock pins it, --locked copies the pinned one.

    Files that neither lock nor signature cover stay away, and none is replaced that is of no version of this name.
    """
    from kvq_runtime.artifact import artifact

    folder = Path(args.output) if args.output else None
    options.check_output("-o", folder, folder=True)
    inside = folder is not None and args.lock is not None and folder.absolute() in Path(args.lock).absolute().parents
    options.check_output("--lock", args.lock, makes=inside)
    policy = _policy(args)
    locked = lock.read_lock(args.locked) if args.locked else None
    resolved = resolve_name(args.reference, args.registry, args.locked)
    if not resolved.registry:
        raise ValueError(f"{args.reference} is a file already; pull copies a name from a registry")
    registry = open_registry(resolved.registry)
    signature = policy and accepted(registry, resolved, policy)
    state = registry.existing(resolved.name)
    version = state.get(resolved.version)
    attachments = {}
    if _covered(registry, resolved, locked, signature):
        attachments = registry.attachments(resolved.name, version)
    elif version.files:
        text = f"left out: {', '.join(version.files)}; lock file or signature do not cover them; sign or pull again"
        warnings.warn(text, stacklevel=2)
    data = artifact.read(registry.fetch_verified(resolved.name, version), resolved.sha256, resolved.size)
    folder = folder or Path(resolved.name)
    contents = {reference.ARTIFACT_FILE: data} | attachments
    known = {entry["sha256"] for one in state.versions.values() for entry in one.files.values()}
    foreign = [name for name in attachments if not (args.force or _is_of(folder / name, known))]
    if foreign:
        raise ArtifactError(f"{folder}: {', '.join(foreign)}: not of {resolved.name}; use another -o, or --force")
    files.make_folder(folder)
    for name, content in contents.items():
        files.save(folder / name, content)
    if args.lock:
        fields = {name: getattr(resolved, name) for name in ("name", "version", "sha256", "size", "commit")}
        demanded = {"policy": policy, "signature": signature, "files": version.beside}
        pinned = Lock(args.reference, resolved.registry, **fields, **demanded)
        lock.write_lock(Path(args.lock), pinned)
    paths = [str(folder / name) for name in contents]
    print_record(_record(resolved) | {"files": paths, "lock": args.lock}, args.json)
    return 0


def _is_of(path: Path, known: set[str]) -> bool:
    """True if a file does not exist, or has one of these digests."""
    try:
        return files.digest(path)[0] in known
    except NotFound:
        return True
    except ArtifactError:  # a link, a folder
        return False


def _record(resolved: Resolved) -> dict[str, Any]:
    """A resolved reference as fields; the commit only if it has one."""
    record = dataclasses.asdict(resolved) | {"path": str(resolved.path)}
    return record if resolved.commit else {name: value for name, value in record.items() if name != "commit"}


def compared(stated: bool) -> dict[str, bool]:
    """Each check of a file that loaded, and whether there was something to compare with: size and digest `stated`."""
    return {check: stated or check not in ("size", "sha256") for check in CHECKS}


def verify(args: Namespace) -> int:
    """Load an artifact with every check, and print a row a check."""
    from kvq_runtime.artifact import artifact

    resolved = resolve(args.reference, args.registry, args.lock)
    artifact.load(resolved.path, resolved.sha256, resolved.size)
    if resolved.yanked is not None:
        warnings.warn(f"{resolved.name} {resolved.version} is yanked: {resolved.yanked}", stacklevel=2)
    rows = [
        {"check": check, "result": "ok" if done else "not compared: a path, and no --lock"}
        for check, done in compared(bool(args.lock or resolved.registry)).items()
    ]
    if args.lock:
        rows.append({"check": "lock", "result": "ok"})
    if args.key:
        _check_signature(resolved, args.lock, _public_key(args.key))
        rows.append({"check": "signature", "result": "ok"})
    if not args.json:
        version = f"{resolved.name} {resolved.version}".rstrip()
        print(f"{version}, sha256 {resolved.sha256}, {resolved.size} bytes\n{resolved.path}\n")
        rows = [{**row, "what": MEANINGS[row["check"]]} for row in rows]
    print_table(rows, args.json)
    if not args.json:
        print(f"\nverified: {version}, {resolved.chosen_because}")
    return 0


# ---- signatures ------------------------------------------------------------------------------------------------------


def sign(args: Namespace) -> int:
    """Sign a version, and store the signature in its registry."""
    registry, name, version = target(args, "sign")
    key, password = Path(args.key), os.environ.get("KVQ_KEY_PASSWORD")
    data = lock.sign(name, version.version, version.sha256, key, password, version.beside)
    digest = registry.add_record("signatures", version.sha256, data, name)
    record = {"name": name, "version": version.version, "sha256": version.sha256, "signature": digest}
    print_record(record, args.json)
    return 0


def _public_key(path: str) -> str:
    """The text of a public key's PEM file; ValueError if it is none."""
    text = files.read(Path(path), 1 << 16).decode(errors="replace")
    if "PUBLIC KEY" not in text:
        raise ValueError(f"key {path}: not a public key in PEM; docs/consume.md shows how to make one")
    return text


def _policy(args: Namespace) -> dict[str, Any] | None:
    """The policy that `kvq pull --lock` writes into the lock file, as in `lock`: that of --key, else the one that
    the lock file has already; None where there is neither, or with --no-policy."""
    if args.key is None:
        there = args.lock and not args.no_policy and Path(args.lock).exists()
        kept = lock.read_lock(args.lock).policy if there else None
        if kept is not None:
            lowest = reference.check_version(args.lowest) if args.lowest else kept["lowest"]
            return {**kept, "lowest": lowest, "follow": args.follow or kept["follow"]}
        if args.lowest or args.follow:
            raise ValueError("--lowest and --follow need --key: they limit which signed versions are accepted")
        return None
    if args.lock is None:
        raise ValueError("--key needs --lock: the lock file keeps the key, and demands signatures whenever it is used")
    lowest = reference.check_version(args.lowest) if args.lowest else ""
    return {"key": _public_key(args.key), "lowest": lowest, "follow": args.follow}


def _covered(registry: Registry, resolved: Resolved, locked: Lock | None, signature: Mapping[str, Any] | None) -> bool:
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


def _check_signature(resolved: Resolved, lock_file: str | None, key: str) -> None:
    """Raise ArtifactError unless the key has signed a version, or a file that is pinned by a lock file.

    lock_file   path of the lock file with the signature of a file that is not from a registry
    key         public key, PEM
    """
    if resolved.registry:
        records = open_registry(resolved.registry).signatures(resolved.sha256, resolved.name)
        lock.find_signature(records, resolved.name, resolved.version, resolved.sha256, key)
        return
    pinned = lock.read_lock(lock_file) if lock_file else None
    if pinned is None or pinned.signature is None:
        text = f"{resolved.path} is a path: use a reference, or a --lock that holds a signature"
        raise ArtifactError(f"signature: {text}")
    records = [strict_json.dumps(pinned.signature).encode()]
    lock.find_signature(records, pinned.name, pinned.version, resolved.sha256, key)
