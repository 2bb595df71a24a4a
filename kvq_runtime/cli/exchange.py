"""The command `kvq export`: write an artifact in the file form of other tools."""

from argparse import Namespace
from pathlib import Path

from kvq_runtime.artifact import oscar_files
from kvq_runtime.cli.table import print_table
from kvq_runtime.disk import files
from kvq_runtime.registry.resolve import load_artifact


def export(args: Namespace) -> int:
    """Write OSCAR's rotation files, and print a row a file."""
    found = oscar_files.from_artifact(load_artifact(args.reference, args.registry))
    folder = Path(args.output)
    files.make_folder(folder)
    for name, data in found.items():
        files.save(folder / name, data)
    print_table([{"path": str(folder / name), "bytes": len(data)} for name, data in found.items()], args.json)
    return 0
