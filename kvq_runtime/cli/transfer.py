"""The commands `kvq push`, `kvq copy` and `kvq export`: write versions to a registry, or as files of other tools."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from kvq_runtime.artifact import oscar_files
from kvq_runtime.cli import options
from kvq_runtime.cli.names import named, target
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import mirror, reference
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import load_artifact, open_registry


def push(args: Namespace) -> int:
    """Copy a version to another registry."""
    source, name, version = target(args, "push")
    destination = _open_target(args)
    row = mirror.copy(source, name, version, destination, args.dry_run)
    print_record(row, args.json)
    return 0


def copy(args: Namespace) -> int:
    """Copy a version, or with --all a name or a registry, to another registry."""
    destination = _open_target(args)
    if not args.all:
        source, name, version = _version(args)
        rows = [mirror.copy(source, name, version, destination, args.dry_run)]
    else:
        source, names = _sources(args)
        rows = [row for name in names for row in mirror.mirror(source, name, destination, args.dry_run)]
    if not args.json:
        rows = [{field: row[field] for field in ("name", "version", "result")} for row in rows]
    print_table(rows, args.json)
    return 0


def _version(args: Namespace) -> tuple[Registry, str, Version]:
    """The one version that `copy` copies without --all; a ValueError for no version says what --all does."""
    try:
        return target(args, "copy")
    except ArtifactError:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}; --all copies every version, alias and yank of a name, or a whole registry"
        ) from None


def export(args: Namespace) -> int:
    """Write OSCAR's rotation files, and print a row a file."""
    place = Path(args.output)
    options.check_output("-o", place, folder=True)
    made = load_artifact(args.reference, args.registry)
    found = {place / name: data for name, data in oscar_files.from_artifact(made).items()}
    for path, data in found.items():
        files.make_folder(path.parent)
        options.write_output(path, data)
    print_table([{"path": str(path), "bytes": len(data)} for path, data in found.items()], args.json)
    return 0


def _sources(args: Namespace) -> tuple[Registry, list[str]]:
    """The names that `copy --all` copies: one, or every name of a registry."""
    address = args.reference.rstrip("/")
    on_hub = address.startswith(reference.HUB)
    remote = address.startswith((reference.BUCKET, reference.OCI))
    try:
        whole = remote and bool(open_registry(address).names())  # else it is a name there
    except PermissionError:  # as registries refuse what is not there, if it is a name
        with suppress(PermissionError, ValueError):
            source, name = named(Namespace(name=address, registry=None))
            if name in source.names():
                return source, [name]
        raise
    except ArtifactError:
        raise
    except ValueError:  # no address of a registry
        whole = False
    if address.startswith("file://") or whole or (on_hub and "/" not in address.removeprefix(reference.HUB)):
        options.check_there(address)
        source = open_registry(address)
        return source, source.names()
    source, name = named(Namespace(name=address, registry=args.registry))
    return source, [name]


def _open_target(args: Namespace) -> Registry:
    """The registry to copy to; with --private it creates private repositories on a Hub."""
    registry = open_registry(args.to)
    return HubRegistry(registry.org, private=True) if args.private and isinstance(registry, HubRegistry) else registry
