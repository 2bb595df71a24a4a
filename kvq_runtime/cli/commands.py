"""What the `kvq` commands do: each takes parsed arguments, prints, and returns an exit code."""

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

from kvq_runtime import artifact, compare, describe, files, reference, signatures
from kvq_runtime.errors import ArtifactError
from kvq_runtime.recipe import preset, presets
from kvq_runtime.reference import Lock, Reference
from kvq_runtime.registries import hub_upkeep, search, upkeep
from kvq_runtime.registries.changes import Registry
from kvq_runtime.registries.events import State
from kvq_runtime.registries.hub import HubRegistry
from kvq_runtime.registries.local import LocalRegistry
from kvq_runtime.registry import Resolved, choose, load_artifact, open_registry, resolve
from kvq_runtime.table import print_record, print_table


def list_names(args: Namespace) -> int:
    """One row a name: what production is, the newest version, recipe and model."""
    registry, broken = open_registry(args.where or args.registry), 0
    rows = []
    for name in registry.names():
        try:
            state = registry.state(name)
            if state.events:
                rows.append(_list_row(registry, state))
        except (ArtifactError, PermissionError) as error:
            broken = 1
            rows.append({"name": name, "recipe": f"cannot be read: {error}"})
    if rows or args.json:
        print_table(rows, args.json)
    else:
        print(f"{registry.url} is empty; kvq-calibrate publishes artifacts, kvq copy brings those of another registry")
    return broken


def _list_row(registry: Registry, state: State) -> dict[str, Any]:
    newest = state.newest()
    row = {"name": state.name, "production": state.at(reference.PRODUCTION), "newest": newest and newest.version}
    row |= {"versions": len(state.versions)}
    if newest is None:
        return row | {"recipe": "(every version is yanked)"}
    about = registry.about(state.name, newest)
    return row | {"recipe": about["recipe"], "model": about["model"], "published": newest.at}


def show(args: Namespace) -> int:
    """Everything about one version, with what was measured of it since."""
    found = resolve(args.reference, args.registry, args.lock)
    fitted = artifact.load(found.path, found.sha256, found.size)
    record: dict[str, Any] = _record(found)
    if found.registry:
        registry = open_registry(found.registry)
        state = registry.existing(found.name)
        version = state.get(found.version)
        record["published"] = version.at
        record["aliases"] = [alias for alias in state.aliases if state.at(alias) == found.version]
        record["files"] = dict(version.files)
        record["evaluations"] = registry.evaluations(found.sha256, found.name)
    record |= describe.artifact_record(fitted)
    print_record(record if args.json else describe.brief(record), args.json)
    for title, rows in ({} if args.json else describe.tables(record)).items():
        print(f"\n{title}")
        print_table(rows, json=False)
    return 0


def pull(args: Namespace) -> int:
    """Copy a version and the files beside it into a folder, checked; --lock pins it, --locked takes what is pinned."""
    policy = signatures.policy(args)
    found = resolve(args.reference, args.registry, args.locked)
    if not found.registry:
        raise ValueError(f"{args.reference} is a file already; pull takes a name in a registry")
    registry = open_registry(found.registry)
    signed = policy and signatures.accepted(registry, found, policy)
    version = registry.existing(found.name).get(found.version)
    beside = registry.beside(found.name, version)
    data = files.read(registry.whole(found.name, version), found.size)
    artifact.from_bytes(data, found.sha256)
    folder = Path(args.output or found.name)
    written = {"kvq.safetensors": data} | beside
    files.make_folder(folder)
    for name, content in written.items():
        files.save(folder / name, content)
    if args.lock:
        fields = {name: getattr(found, name) for name in ("name", "version", "sha256", "size", "commit")}
        pinned = Lock(args.reference, found.registry, **fields, policy=policy, signature=signed)
        reference.write_lock(Path(args.lock), pinned)
    paths = [str(folder / name) for name in written]
    print_record(_record(found) | {"files": paths, "lock": args.lock}, args.json)
    return 0


def _record(found: Resolved) -> dict[str, Any]:
    """A resolved reference as fields; a commit only where there is one."""
    record = dataclasses.asdict(found) | {"path": str(found.path)}
    return record if found.commit else {name: value for name, value in record.items() if name != "commit"}


def verify(args: Namespace) -> int:
    """Load an artifact with every check, and list them."""
    found = resolve(args.reference, args.registry, args.lock)
    artifact.load(found.path, found.sha256, found.size)
    against = "lock" if args.lock else "registry" if found.registry else None
    rows = []
    for check in artifact.CHECKS:
        compared = check not in ("size", "sha256") or against
        result = "ok" if compared else "not compared: a path, and no --lock"
        rows.append({"check": check, "result": result})
    if args.key:
        signatures.check(found, args.lock, signatures.public_key(args.key))
        rows.append({"check": "signature", "result": "ok"})
    print_table(rows, args.json)
    return 0


def promote(args: Namespace) -> int:
    """Point an alias to a version."""
    registry, name, version = target(args, "promote")
    state = registry.promote(name, version, args.alias, args.expect)
    return _print_alias(state, args)


def rollback(args: Namespace) -> int:
    """Point an alias to the version it had before."""
    registry, name = named(args)
    return _print_alias(registry.rollback(name, args.alias), args)


def named(args: Namespace) -> tuple[Registry, str]:
    """The registry and name of NAME or hf://org/NAME."""
    wanted = reference.parse(args.name)
    if not isinstance(wanted, Reference) or wanted.by != "default":
        raise ValueError(f"name {args.name!r:.160}; use a name alone, or hf://org/name")
    return open_registry(wanted.registry or args.registry), wanted.name


def _print_alias(state: State, args: Namespace) -> int:
    had = state.aliases[args.alias]
    record = {"name": state.name, "alias": args.alias, "version": had[-1], "before": had[-2] if len(had) > 1 else None}
    print_record(record, args.json)
    return 0


def yank(args: Namespace) -> int:
    """Withdraw a version."""
    registry, name, version = target(args, "yank")
    registry.yank(name, version, args.reason)
    print_record({"name": name, "version": version, "yanked": args.reason}, args.json)
    return 0


def search_names(args: Namespace) -> int:
    """Every version that was made of what is asked for."""
    registry = open_registry(args.where or args.registry)
    wanted = {field: getattr(args, field) for field in search.FIELDS}
    rows = list(search.search(registry, wanted))
    if not args.json:
        rows = [{name: row[name] for name in ("name", "version", *search.FIELDS[1:], "yanked")} for row in rows]
    print_table(rows, args.json)
    return 0


def target(args: Namespace, what: str) -> tuple[Registry, str, str]:
    """The version that a change is about: it must be chosen by the user, not by a default."""
    wanted = reference.parse(args.reference)
    if not isinstance(wanted, Reference) or wanted.by == "default":
        raise ValueError(f"{what} {args.reference}: say which version, as in {what} NAME@1.2.0")
    registry = open_registry(wanted.registry or args.registry)
    version, _ = choose(registry.existing(wanted.name), wanted)
    return registry, wanted.name, version.version


def history(args: Namespace) -> int:
    """Every change of a name."""
    rows = []
    registry, name = named(args)
    for event in registry.existing(name).events:
        row = {"number": event.number, "at": event.at, "change": event.change.kind}
        row |= {name: getattr(event.change, name, None) for name in ("version", "alias", "reason", "sha256")}
        rows.append(row)
    print_table(rows, args.json)
    return 0


def diff(args: Namespace) -> int:
    """What differs between two artifacts."""
    a, b = (load_artifact(given, args.registry) for given in (args.a, args.b))
    print_table(compare.differences(a, b), args.json)
    return 0


def gc(args: Namespace) -> int:
    """Remove what nothing names."""
    registry = open_registry(args.where or args.registry)
    if isinstance(registry, HubRegistry):
        removed = hub_upkeep.collect(registry, args.grace, args.dry_run)
    else:
        assert isinstance(registry, LocalRegistry)
        removed = [str(p.relative_to(registry.root)) for p in upkeep.collect(registry, args.grace, args.dry_run)]
    print_table([{"removed": not args.dry_run, "path": path} for path in removed], args.json)
    return 0


def doctor(args: Namespace) -> int:
    """Everything that is wrong with the registry; 1 if any of it is a fault."""
    registry = open_registry(args.where or args.registry)
    if isinstance(registry, HubRegistry):
        found = hub_upkeep.examine(registry)
    else:
        assert isinstance(registry, LocalRegistry)
        found = upkeep.examine(registry)
    if found or args.json:
        print_table([dataclasses.asdict(finding) for finding in found], args.json)
    else:
        print(f"nothing is wrong with {registry.url}")
    return int(any(finding.level == "fault" for finding in found))


def recipes(args: Namespace) -> int:
    """Every recipe that comes with kvq, a line each; or all settings of one."""
    if args.name:
        chosen = preset(args.name)
        row = describe.recipe_row(chosen, describe.REFERENCE_MODEL)
        print_record(row | ({"settings": chosen.to_json()} if args.json else {}), args.json)
        return 0
    known = presets().values()
    rows = [describe.recipe_row(recipe, describe.REFERENCE_MODEL) for recipe in known]
    if args.json:
        rows = [row | {"settings": recipe.to_json()} for row, recipe in zip(rows, known, strict=True)]
    else:
        rows = [{name: row[name] for name in ("name", "bits", "fitted", "summary")} for row in rows]
    print_table(rows, args.json)
    return 0
