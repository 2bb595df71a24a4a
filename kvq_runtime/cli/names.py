"""The commands of a registry and its names: print what there is, change what an alias means, and keep it in order."""

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from kvq_runtime.cli.exit_codes import say
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.errors import ArtifactError, counted, spoken
from kvq_runtime.registry import rating, reference
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.reference import SEARCHED, Reference
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import choose, open_registry


def list_names(args: Namespace) -> int:
    """Print a row a name: production, newest version, recipe and model; 1 if a name cannot be read."""
    registry, code = open_registry(args.where or args.registry), 0
    rows = []
    for name in registry.names():
        try:
            state = registry.state(name)
            if state.events:
                rows.append(_list_row(registry, state))
        except (ArtifactError, PermissionError) as error:
            code = 1
            rows.append({"name": name, "recipe": f"cannot be read: {spoken(error)}"})
    if rows or args.json:
        print_table(rows, args.json)
    else:
        found = not isinstance(registry, LocalRegistry) or registry.root.is_dir()
        said = f"{registry.url} {'is empty' if found else 'is not there yet'}; kvq-calibrate publishes artifacts"
        print(f"{said}, kvq copy copies those of another registry")
    return code


def _list_row(registry: Registry, state: State) -> dict[str, Any]:
    newest = state.newest()
    row = {"name": state.name, "production": state.at(reference.PRODUCTION), "newest": newest and newest.version}
    row |= {"versions": len(state.versions)}
    if newest is None:
        return row | {"recipe": "(every version is yanked)"}
    about = registry.about(state.name, newest)
    return row | {"recipe": about["recipe"], "model": about["model"], "published": newest.at}


def search_names(args: Namespace) -> int:
    """Print every version whose name, recipe, model, revision and corpus match; 1 if one cannot be read."""
    registry = open_registry(args.where or args.registry)
    query = {field: getattr(args, field) for field in SEARCHED}
    rows = list(search(registry, query))
    code = int(any("sha256" not in row for row in rows))
    if not args.json:
        rows = [{name: row.get(name) for name in ("name", "version", *SEARCHED[1:], "yanked")} for row in rows]
    print_table(rows, args.json)
    return code


def search(registry: Registry, query: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """Yield every version that matches all patterns, as a row.

    query   {field: pattern}, fields of SEARCHED; None matches all. A pattern with * ? [ must match the whole field,
            another a part of it; case is ignored. `corpus` is compared with the name of the corpus and its digest
    What cannot be read, and so may match, is a row without a digest that says why.
    """
    patterns = {field: pattern.lower() for field, pattern in query.items() if pattern}
    for name in registry.names():
        if "name" in patterns and not _matches(patterns["name"], name):
            continue
        row: dict[str, Any] = {"name": name}
        try:
            versions = registry.state(name).versions.values()
        except (ArtifactError, PermissionError) as error:
            yield row | {"recipe": f"cannot be read: {spoken(error)}"}
            continue
        for version in versions:
            row = {"name": name, "version": version.version}
            try:
                row |= registry.about(name, version)
            except (ArtifactError, PermissionError) as error:
                yield row | {"recipe": f"cannot be read: {spoken(error)}"}
                continue
            if all(_matches(pattern, row[f]) or _matches_digest(f, pattern, row) for f, pattern in patterns.items()):
                yield row | {"sha256": version.sha256, "published": version.at, "yanked": version.yanked}


def _matches(pattern: str, value: Any) -> bool:
    text = str(value or "").lower()
    return fnmatchcase(text, pattern) if any(sign in pattern for sign in "*?[") else pattern in text


def _matches_digest(field: str, pattern: str, row: Mapping[str, Any]) -> bool:
    return field == "corpus" and len(pattern) >= 8 and str(row["corpus_digest"] or "").startswith(pattern)


def history(args: Namespace) -> int:
    """Print every change of a name."""
    registry, name = named(args)
    print_table(changes(registry.existing(name)), args.json)
    return 0


def changes(state: State) -> list[dict[str, Any]]:
    """A row a change of a name, in their order."""
    fields = ("version", "alias", "reason", "sha256")
    return [
        {"number": one.number, "at": one.at, "change": one.change.kind}
        | {field: getattr(one.change, field, None) for field in fields}
        for one in state.events
    ]


def promote(args: Namespace) -> int:
    """Point an alias to a version."""
    registry, name, version = target(args, "promote")
    state = registry.promote(name, version.version, args.alias, args.expect, args.force)
    found = rating.rate_version(registry, name, version)
    if found.word != rating.USABLE and not args.json:
        say("kvq", f"{name}@{version.version} is {found}")
    return _print_alias(state, args)


def rollback(args: Namespace) -> int:
    """Point an alias to the version it had before."""
    registry, name = named(args)
    return _print_alias(registry.rollback(name, args.alias), args)


def _print_alias(state: State, args: Namespace) -> int:
    *earlier, version = state.aliases[args.alias]
    before = earlier[-1] if earlier else None
    print_record({"name": state.name, "alias": args.alias, "version": version, "before": before}, args.json)
    return 0


def yank(args: Namespace) -> int:
    """Withdraw a version."""
    registry, name, version = target(args, "yank")
    registry.yank(name, version.version, args.reason)
    print_record({"name": name, "version": version.version, "yanked": args.reason}, args.json)
    return 0


def named(args: Namespace) -> tuple[Registry, str]:
    """The registry and name that the argument NAME or hf://org/NAME means; ValueError for other references."""
    parsed = reference.parse(args.name)
    if not isinstance(parsed, Reference) or parsed.by != "default":
        alone = f"{parsed.registry and parsed.registry + '/'}{parsed.name}" if isinstance(parsed, Reference) else "NAME"
        raise ValueError(f"name {args.name!r:.160}; use a name alone, without a version, as in {alone}")
    return open_registry(parsed.registry or args.registry), parsed.name


def target(args: Namespace, command: str) -> tuple[Registry, str, Version]:
    """Registry, name and version that a command changes; ValueError unless the reference names the version."""
    parsed = reference.parse(args.reference)
    if not isinstance(parsed, Reference) or parsed.by == "default":
        known = isinstance(parsed, Reference)
        look = f"; kvq history {args.reference} lists its versions" if known else ", in a registry"
        example = f"{args.reference if known else 'NAME'}@1.2.0"
        raise ValueError(f"{command} {args.reference}: name the version, as in kvq {command} {example} ...{look}")
    registry = open_registry(parsed.registry or args.registry)
    return registry, parsed.name, choose(registry.existing(parsed.name), parsed)[0]


def gc(args: Namespace) -> int:
    """Remove temporary files, and blobs or files that no event names."""
    registry = open_registry(args.where or args.registry)
    start = f"{registry.root}/" if isinstance(registry, LocalRegistry) else ""
    removed = [path.removeprefix(start) for path in registry.collect(args.grace, args.dry_run)]
    print_table([{"removed": not args.dry_run, "path": path} for path in removed], args.json)
    return 0


def doctor(args: Namespace) -> int:
    """Print everything that is wrong with the registry; 1 if any of it is a fault."""
    registry = open_registry(args.where or args.registry)
    findings = registry.examine()
    if findings or args.json:
        print_table([dataclasses.asdict(finding) for finding in findings], args.json)
    else:
        print(f"nothing is wrong with {registry.url}: {counted(len(registry.names()), 'name')}")
    return int(any(finding.level == "fault" for finding in findings))
