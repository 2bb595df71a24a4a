"""The commands `kvq gc` and `kvq doctor`: remove what no event names, and print what is wrong with a registry."""

import dataclasses
from argparse import Namespace

from kvq_runtime.cli.table import print_table
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.local.registry import LocalRegistry
from kvq_runtime.registry.resolve import open_registry


def gc(args: Namespace) -> int:
    """Remove temporary files, and blobs or files that no event names."""
    from kvq_runtime.registry.hub import upkeep as hub_upkeep
    from kvq_runtime.registry.local import upkeep as local_upkeep

    registry = open_registry(args.where or args.registry)
    if isinstance(registry, HubRegistry):
        removed = hub_upkeep.collect(registry, args.grace, args.dry_run)
    else:
        assert isinstance(registry, LocalRegistry)
        removed = [str(p.relative_to(registry.root)) for p in local_upkeep.collect(registry, args.grace, args.dry_run)]
    print_table([{"removed": not args.dry_run, "path": path} for path in removed], args.json)
    return 0


def doctor(args: Namespace) -> int:
    """Print everything that is wrong with the registry; 1 if any of it is a fault."""
    from kvq_runtime.registry.hub import upkeep as hub_upkeep
    from kvq_runtime.registry.local import upkeep as local_upkeep

    registry = open_registry(args.where or args.registry)
    if isinstance(registry, HubRegistry):
        findings = hub_upkeep.examine(registry)
    else:
        assert isinstance(registry, LocalRegistry)
        findings = local_upkeep.examine(registry)
    if findings or args.json:
        print_table([dataclasses.asdict(finding) for finding in findings], args.json)
    else:
        print(f"nothing is wrong with {registry.url}")
    return int(any(finding.level == "fault" for finding in findings))
