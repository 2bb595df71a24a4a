"""The commands of a registry and its names: print what there is, change what an alias means, and keep it in order."""

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from heapq import merge
from textwrap import shorten
from typing import Any

from kvq_runtime.cli.exit_codes import PROPOSED, say
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.errors import ArtifactError, counted, spoken
from kvq_runtime.registry import reference, remarks, verdict
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.reference import SEARCHED, Reference
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.remarks import Remarks
from kvq_runtime.registry.resolve import choose, open_registry


def list_names(args: Namespace) -> int:
    """Print a row a name: production, newest version, recipe and model; 1 if a name cannot be read."""
    registry, code = open_registry(args.where or args.registry), 0
    if args.tag is not None:
        remarks.check_tag(args.tag)
    rows = []
    for name in registry.names():
        try:
            state = registry.state(name)
            tagged = _tagged(registry, state, args.tag) if state.events else None
            if tagged is not None:
                rows.append(_list_row(registry, state) | tagged)
        except (ArtifactError, PermissionError) as error:
            code = 1
            rows.append({"name": name, "recipe": f"cannot be read: {spoken(error)}"})
    if rows or args.json or args.tag:
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


def _tagged(registry: Registry, state: State, tag: str | None) -> dict[str, Any] | None:
    """The column of versions that have a tag, none if it is not asked for; None if no version has it."""
    if tag is None:
        return {}
    found = remarks.read(registry, state.name, "tag", "untag", tag=tag)
    return {"tagged": having} if (having := [one for one in state.versions if tag in found.tags(one)]) else None


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
    """Print every change of a name, remarks among them."""
    registry, name = named(args)
    rows = changes(registry.existing(name))
    said = [{"at": one.at, "change": one.what, "by": one.by, **one.said} for one in remarks.read(registry, name).all]
    print_table(list(merge(said, rows, key=lambda row: row["at"])), args.json)
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
    found = verdict.of_version(registry, name, version)
    if found.word != verdict.USABLE and not args.json:
        say("kvq", f"{name}@{version.version} is {found}")
    return _print_moved(registry, state, version, args)


def approve(args: Namespace) -> int:
    """Approve of a promote, which moves the alias if that is enough."""
    registry, name, version = target(args, "approve")
    state = remarks.approve(registry, name, version.version, args.alias, args.force)
    return _print_moved(registry, state, version, args)


def protect(args: Namespace) -> int:
    """Let an alias move only with approvals."""
    registry, name = named(args)
    remarks.protect(registry, name, args.alias, args.approvals)
    print_record({"name": name, "alias": args.alias, "approvals": args.approvals}, args.json)
    return 0


def _print_moved(registry: Registry, state: State, version: Version, args: Namespace) -> int:
    """Print where an alias has moved; if it is protected, what is proposed and who approves, and return PROPOSED."""
    if state.at(args.alias) == version.version:
        return _print_alias(state, args)
    found = remarks.read(registry, state.name, *remarks.OF_ALIASES, alias=args.alias)
    record = {"name": state.name, "alias": args.alias, "version": state.at(args.alias)}
    proposed = proposals(found, state, alias=args.alias, version=version.version)
    print_record(record | ({"proposed": proposed} if args.json else {}), args.json)
    which = f"{state.name}@{version.version} --alias {args.alias}"
    for one in proposed if not args.json else []:
        approved = "".join(f", {name} approved" for name in one["approved"])
        missing = one["needed"] - len(one["approved"])
        more = f"1 other name has to approve: `kvq approve {which}`"
        if missing > 1:
            more = f"{missing} other names have to approve: `kvq approve {which}`"
        elif missing < 1:  # approvals, or the protection's end, came meanwhile
            more = f"nobody else has to approve: `kvq promote {which}` moves it"
        said = f"{args.alias} is protected and did not move: {one['by']} proposed it at {one['at']}{approved}"
        say("kvq", f"{said}; {more}")
    if not proposed and not args.json:
        text = f"{args.alias} did not move, and no proposal is open: it was moved meanwhile"
        say("kvq", f"{text}; look at `kvq history {state.name}`, then `kvq promote {which}`")
    return PROPOSED


def proposals(found: Remarks, state: State, **said: str) -> list[dict[str, Any]]:
    """The open proposals of an alias, or of a version, as rows."""
    return [
        {"version": one.said["version"], "alias": one.said["alias"], "at": one.at, "by": one.by}
        | {"approved": found.approved_by(one), "needed": found.approvals(one.said["alias"])}
        for one in found.proposals(state, **said)
    ]


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


def note(args: Namespace) -> int:
    """Add a note to a version."""
    registry, name, version = target(args, "note")
    remarks.note(registry, name, version.version, args.text)
    text = args.text if args.json else shorten(args.text, 60, placeholder=" ...")
    print_record({"name": name, "version": version.version, "note": text}, args.json)
    return 0


def tag(args: Namespace) -> int:
    """Give a version a tag, or take it away."""
    registry, name, version = target(args, "tag")
    before = remarks.read(registry, name, "tag", "untag", version=version.version).tags(version.version)
    tags = remarks.tag(registry, name, version.version, args.tag, args.remove)
    if args.remove == (args.tag not in before):
        said = "has no tag" if args.remove else "has the tag already:"
        say("kvq", f"{name}@{version.version} {said} {args.tag}; nothing was changed")
    print_record({"name": name, "version": version.version, "tags": tags}, args.json)
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
