"""The commands of one version, `kvq show`, `pull`, `verify` and `diff`: see, fetch, check and compare it."""

import dataclasses
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

from kvq_runtime.cli import sign
from kvq_runtime.cli.table import percent, print_record, print_table, printable
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import lock, reference, shown, verdict
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.measured import Record
from kvq_runtime.registry.resolve import Resolved, load_artifact, open_registry, resolve, resolve_name
from kvq_runtime.registry.sound import sound

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
        found_to_be = [str(verdict.of_version(registry, resolved.name, version)), *record["aliases"]]
        found_to_be += [] if version.yanked is None else [f"yanked: {version.yanked}"]
        found = registry.evaluations(resolved.sha256, resolved.name)
        evaluations = sound(found)
        record["evaluations"] = [one.raw for one in evaluations]
        if len(evaluations) < len(found):
            said = f"{len(found) - len(evaluations)} evaluations are of a form that is not read, and left out"
            warnings.warn(said, stacklevel=2)
    record |= describe.artifact_record(loaded) | ({"settings": loaded.recipe.to_json()} if args.json else {})
    if not args.json:
        lead = [f"{resolved.name} {resolved.version}".rstrip(), f"{record['recipe']['bits']:.3g} bits", *found_to_be]
        print(printable("; ".join(lead)) + "\n")
    print_record(record if args.json else describe.brief(record), args.json)
    for title, rows in ({} if args.json else shown.tables(evaluations) | describe.tables(record)).items():
        print(f"\n{title}")
        print_table([{name: _shown(name, value) for name, value in row.items()} for row in rows], json=False)
    return 0


def _shown(column: str, value: Any) -> Any:
    """A cell of the table of evaluations; shares in per cent, as in the tables of kvq eval."""
    what = column.rpartition(" ")[2]
    if not isinstance(value, float) or what not in ("relative", "top1", "decoded"):
        return value
    return percent(value) if what == "relative" else f"{value:.2%}"


def pull(args: Namespace) -> int:
    """Copy a version and the files beside it into a folder, checked; --lock pins it, --locked copies the pinned one.

    Files that neither lock nor signature cover stay away, and none is replaced that is of no version of this name.
    """
    from kvq_runtime.artifact import artifact

    folder = Path(args.output) if args.output else None
    if folder and folder.exists() and not folder.is_dir():
        raise ArtifactError(f"-o {folder}: not a folder; name a new one, or one that kvq pull wrote")
    policy = sign.policy(args)
    locked = lock.read_lock(args.locked) if args.locked else None
    resolved = resolve_name(args.reference, args.registry, args.locked)
    if not resolved.registry:
        raise ValueError(f"{args.reference} is a file already; pull copies a name from a registry")
    registry = open_registry(resolved.registry)
    signature = policy and sign.accepted(registry, resolved, policy)
    state = registry.existing(resolved.name)
    version = state.get(resolved.version)
    attachments = {}
    if sign.covered(registry, resolved, locked, signature):
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


def verify(args: Namespace) -> int:
    """Load an artifact with every check, and print a row a check."""
    from kvq_runtime.artifact import artifact

    resolved = resolve(args.reference, args.registry, args.lock)
    artifact.load(resolved.path, resolved.sha256, resolved.size)
    has_digest = bool(args.lock or resolved.registry)
    rows = []
    for check in artifact.CHECKS:
        compared = has_digest or check not in ("size", "sha256")
        rows.append({"check": check, "result": "ok" if compared else "not compared: a path, and no --lock"})
    if args.lock:
        rows.append({"check": "lock", "result": "ok"})
    if args.key:
        sign.check(resolved, args.lock, sign.public_key(args.key))
        rows.append({"check": "signature", "result": "ok"})
    if not args.json:
        version = f"{resolved.name} {resolved.version}".rstrip()
        print(f"{version}, sha256 {resolved.sha256}, {resolved.size} bytes\n{resolved.path}\n")
        rows = [{**row, "what": MEANINGS[row["check"]]} for row in rows]
    print_table(rows, args.json)
    if not args.json:
        print(f"\nverified: {version}, {resolved.chosen_because}")
    return 0


def diff(args: Namespace) -> int:
    """Print what differs between two artifacts."""
    from kvq_runtime.artifact.diff import diff as differences
    from kvq_runtime.registry import compared

    a, b = (load_artifact(reference, args.registry) for reference in (args.a, args.b))
    found = differences(a, b)
    left_out = compared.unlike(a, b) if any(row["part"] == "fit" for row in found) else None
    found = [row for row in found if left_out is None or row["part"] != "fit"]
    rows = [*compared.rows(a, b, _evaluations(args.a, args), _evaluations(args.b, args)), *found] if found else []
    if args.json:
        print_table(rows, json=True)
    elif not rows:
        print(f"{args.a} and {args.b} are equal")
    else:
        names = {"a": args.a, "b": args.b, "change": "relative change"}
        shown = [row for row in rows if args.layers or row["part"] not in ("fit", "tensor")]
        if len(shown) < len(rows):
            print(f"{len(rows) - len(shown)} rows of the fit and of tensors are left out: --layers\n")
        if left_out:
            print(f"Errors of the fits are not compared: {left_out}\n")
        rows = shown
        print_table([{names.get(name, name): value for name, value in row.items()} for row in rows], json=False)
        print("\nrelative change: (b - a) / |a| of numbers, |b - a| / |a| of tensors, of codes the share that differs")
    return 0


def _evaluations(reference: str, args: Namespace) -> list[Record]:
    """Return a registry's evaluations of a version; a file has none."""
    resolved = resolve(reference, args.registry)
    if not resolved.registry:
        return []
    return sound(open_registry(resolved.registry).evaluations(resolved.sha256, resolved.name))
