"""The command `kvq export`: write an artifact in the file form of other tools."""

from argparse import Namespace
from pathlib import Path

from kvq_runtime.artifact import gguf_mean, oscar_files
from kvq_runtime.cli.table import print_table
from kvq_runtime.disk import files
from kvq_runtime.registry.resolve import load_artifact


def export(args: Namespace) -> int:
    """Write OSCAR's rotation files, or llama.cpp's bias file, and print a row a file."""
    made, place = load_artifact(args.reference, args.registry), Path(args.output)
    if args.form == "gguf-mean":
        found = {place: gguf_mean.from_artifact(made, args.channels)}
    elif args.channels is not None:
        raise ValueError(f"--channels {args.channels} is of gguf-mean; leave it out")
    else:
        found = {place / name: data for name, data in oscar_files.from_artifact(made).items()}
    for path, data in found.items():
        files.make_folder(path.parent)
        files.save(path, data)
    print_table([{"path": str(path), "bytes": len(data)} for path, data in found.items()], args.json)
    return 0
