"""The commands about names: list, change and copy them."""

from argparse import Namespace
from typing import Any

from kvq_runtime.cli.exit_codes import say
from kvq_runtime.cli.options import check_exists
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.errors import ArtifactError, spoken
from kvq_runtime.registry import rating, reference
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.reference import Reference
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import choose, open_registry


def run_list(args: Namespace) -> int:
    """Print a row a name: production, newest version, recipe and model; return 1 if a name cannot be read."""
    registry, code, rows = _registry(args), 0, []
    for name in registry.names():
        try:
            if (state := registry.state(name)).events:
                rows.append(_list_row(registry, state))
        except (ArtifactError, PermissionError) as error:
            code = 1
            rows.append({"name": name, "recipe": f"cannot be read: {spoken(error)}"})
    if rows or args.json:
        print_table(rows, args.json)
    else:
        print(f"{registry.url} is empty; kvq-calibrate publishes artifacts, kvq copy copies those of another registry")
    return code


def _list_row(registry: Registry, state: State) -> dict[str, Any]:
    newest = state.newest()
    row = {"name": state.name, "production": state.at(reference.PRODUCTION), "newest": newest and newest.version}
    row |= {"versions": len(state.versions)}
    if newest is None:
        return row | {"recipe": "(every version is yanked)"}
    about = newest.about
    return row | {"recipe": about["recipe"], "model": about["model"], "published": newest.at}


def _registry(args: Namespace) -> Registry:
    """Open the registry in use, which must exist if it is named."""
    check_exists(args.registry)
    return open_registry(args.registry)


def run_history(args: Namespace) -> int:
    """Print every change of a name."""
    registry, name = _name(args)
    fields = ("version", "alias", "force", "reason", "sha256")
    rows = [
        {"number": event.number, "at": event.at, "by": event.by, "change": event.change.kind}
        | {field: getattr(event.change, field, None) for field in fields}
        for event in registry.existing(name).events
    ]
    print_table(rows, args.json)
    return 0


def run_promote(args: Namespace) -> int:
    """Point an alias to a version."""
    registry, name, version = target(args, "promote")
    state = registry.promote(name, version.version, args.alias, args.expect, args.force)
    rated = rating.rate_version(registry, name, version)
    if rated.word != rating.USABLE and not args.json:
        say("kvq", f"{name}@{version.version} is {rated}")
    return _print_alias(state, args)


def run_rollback(args: Namespace) -> int:
    """Point an alias to the version it had before."""
    registry, name = _name(args)
    return _print_alias(registry.rollback(name, args.alias), args)


def _print_alias(state: State, args: Namespace) -> int:
    *earlier, version = state.aliases[args.alias]
    before = earlier[-1] if earlier else None
    print_record({"name": state.name, "alias": args.alias, "version": version, "before": before}, args.json)
    return 0


def run_yank(args: Namespace) -> int:
    """Withdraw a version."""
    registry, name, version = target(args, "yank")
    registry.yank(name, version.version, args.reason)
    print_record({"name": name, "version": version.version, "yanked": args.reason}, args.json)
    return 0


def run_copy(args: Namespace) -> int:
    """Copy one version, or all of a name, to another registry."""
    from kvq_runtime.registry.copy import copy_version
    from kvq_runtime.registry.hub import HubRegistry

    parsed = reference.parse(args.reference)
    if not isinstance(parsed, Reference):
        raise ValueError(f"copy {args.reference}: is a file; name a version in a registry, as in kvq copy NAME@1.2.0")
    source, destination = open_registry(parsed.registry or args.registry), open_registry(args.to)
    if args.private and isinstance(destination, HubRegistry):
        destination = HubRegistry(destination.org, private=True)
    state = source.existing(parsed.name)
    versions = [*state.versions.values()] if parsed.by == "default" else [choose(state, parsed)[0]]
    print_table([copy_version(source, parsed.name, version, destination) for version in versions], args.json)
    return 0


def _name(args: Namespace) -> tuple[Registry, str]:
    """Return the registry and name of an argument NAME or hf://org/NAME; raise ValueError for other references."""
    parsed = reference.parse(args.name)
    if not isinstance(parsed, Reference) or parsed.by != "default":
        raise ValueError(f"name {args.name!r:.160}; use a name alone, without a version")
    return open_registry(parsed.registry or args.registry), parsed.name


def target(args: Namespace, command: str) -> tuple[Registry, str, Version]:
    """Return registry, name and version that a command changes; raise ValueError without a version."""
    parsed = reference.parse(args.reference)
    if not isinstance(parsed, Reference) or parsed.by == "default":
        raise ValueError(
            f"{command} {args.reference}: name the version, as in kvq {command} NAME@1.2.0; kvq history NAME lists them"
        )
    registry = open_registry(parsed.registry or args.registry)
    return registry, parsed.name, choose(registry.existing(parsed.name), parsed)[0]
