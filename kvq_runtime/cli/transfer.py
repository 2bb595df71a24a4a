"""Run `kvq copy`: write versions to another registry."""

from argparse import Namespace

from kvq_runtime.cli.table import print_table
from kvq_runtime.registry import reference
from kvq_runtime.registry.copy import copy_version
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.reference import Reference
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import choose, open_registry


def copy(args: Namespace) -> int:
    """Copy one version, or all of a name, to another registry."""
    parsed = reference.parse(args.reference)
    if not isinstance(parsed, Reference):
        raise ValueError(
            f"copy {args.reference}: a file; name what a registry has, as in kvq copy NAME@1.2.0 {args.to}"
        )
    source, destination = open_registry(parsed.registry or args.registry), _open_target(args)
    state = source.existing(parsed.name)
    versions = [*state.versions.values()] if parsed.by == "default" else [choose(state, parsed)[0]]
    rows = [copy_version(source, parsed.name, version, destination, args.dry_run) for version in versions]
    if not args.json:
        rows = [{field: row[field] for field in ("name", "version", "result")} for row in rows]
    print_table(rows, args.json)
    return 0


def _open_target(args: Namespace) -> Registry:
    """The registry to copy to; with --private it creates private repositories on a Hub."""
    registry = open_registry(args.to)
    return HubRegistry(registry.org, private=True) if args.private and isinstance(registry, HubRegistry) else registry
