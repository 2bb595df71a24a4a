"""What `kvq push` and `kvq copy` do: copy versions from one registry to another."""

from argparse import Namespace

from kvq_runtime import reference
from kvq_runtime.commands import named, target
from kvq_runtime.registries import mirror
from kvq_runtime.registries.changes import Registry
from kvq_runtime.registries.hub import HubRegistry
from kvq_runtime.registry import open_registry
from kvq_runtime.table import print_record, print_table


def push(args: Namespace) -> int:
    """Copy a version to another registry."""
    source, name, version = target(args, "push")
    there = _private(open_registry(args.to), args.private)
    found = source.existing(name).get(version)
    print_record(mirror.copy(source, name, found, there, args.dry_run), args.json)
    return 0


def copy(args: Namespace) -> int:
    """Copy a version, a name or a whole registry to another registry."""
    there = _private(open_registry(args.to), args.private)
    if not args.all:
        source, name, version = target(args, "copy")
        rows = [mirror.copy(source, name, source.existing(name).get(version), there, args.dry_run)]
    else:
        source, names = _sources(args)
        rows = [row for name in names for row in mirror.mirror(source, name, there, args.dry_run)]
    if not args.json:
        rows = [{field: row[field] for field in ("name", "version", "result")} for row in rows]
    print_table(rows, args.json)
    return 0


def _sources(args: Namespace) -> tuple[Registry, list[str]]:
    """What `copy --all` is about: the name given, or every name of the registry given."""
    address = args.reference.rstrip("/")
    on_hub = address.startswith(reference.HUB)
    if address.startswith("file://") or (on_hub and "/" not in address.removeprefix(reference.HUB)):
        source = open_registry(address)
        return source, source.names()
    source, name = named(Namespace(name=address, registry=args.registry))
    return source, [name]


def _private(registry: Registry, private: bool) -> Registry:
    """The registry, told that repositories it creates are private."""
    return HubRegistry(registry.org, private=True) if private and isinstance(registry, HubRegistry) else registry
