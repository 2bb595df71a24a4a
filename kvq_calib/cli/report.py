"""The command `kvq report`: gather what is known, write a page or print it as JSON."""

import argparse
import json
import sys
import webbrowser
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvq_calib.report import registry_page, version_page
from kvq_runtime.artifact import artifact
from kvq_runtime.cli import options
from kvq_runtime.cli.exit_codes import say
from kvq_runtime.cli.table import print_record
from kvq_runtime.disk import files
from kvq_runtime.registry.evaluation_records import TextRecord, readable, text_records
from kvq_runtime.registry.reference import parse
from kvq_runtime.registry.resolve import choose, open_registry, resolve

LIMIT = 1 << 28  # bytes of a file of records


def report(args: argparse.Namespace) -> int:
    """Run `kvq report`: 0, or 1 for a page of something that a check found damaged."""
    if args.reference is None and args.registry is None:
        raise ValueError("nothing is named; give NAME for the page of a version, or --registry for that of all of them")
    options.check_named(args)
    if args.reference is None:
        if args.compare:
            raise ValueError("--compare FILE is for the page of a version; give its NAME")
        found = registry_page.of_registry(open_registry(args.registry or None), datetime.now(UTC))
        out = Path(args.out or "registry.html")
        if args.out and (out.is_dir() or not (out.suffix or out.exists())):
            _all_pages(args, found)
        damaged = [f"{one['name']}: {one['reason']}" for one in found["faults"]]
        damaged += [f"{row['name']} {row['version']}: {row['damage']}" for row in found["versions"] if row["damage"]]
        return _give(args, found, registry_page.page, "registry.html", damaged)
    found = _version(args)
    name = f"{found['name']}-v{found['version']}.html" if found["version"] else f"{found['name']}.html"
    return _give(args, found, version_page.page, name, version_page.faults(found))


def _all_pages(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write the page of every version into the folder --out, linked from the rows of the registry's, index.html."""
    options.check_output("--out", args.out, folder=True)
    folder, registry = Path(args.out), open_registry(args.registry or None)
    files.make_folder(folder)
    for row in found["versions"]:
        row["page"] = f"{row['name']}-v{row['version']}.html"
        known_of_it = version_page.of_version(registry, row["name"], row["version"])
        files.save(folder / row["page"], version_page.page(known_of_it).encode())
    args.out = str(folder / "index.html")


def _version(args: argparse.Namespace) -> dict[str, Any]:
    """Gather what is known of the version that the reference means."""
    folder, compared = Path(args.reference), _records(args.compare)
    given = folder if folder.is_dir() else parse(args.reference)
    if isinstance(given, Path):
        resolved = resolve(args.reference, args.registry or None)
        made = artifact.load(resolved.path, resolved.sha256, resolved.size)
        return version_page.of_file(made, resolved.name, resolved.sha256, resolved.size, compared)
    registry = open_registry(given.registry or args.registry or None)
    chosen, _ = choose(registry.existing(given.name), given)
    return version_page.of_version(registry, given.name, chosen.version, compared)


def _records(file: str | None) -> list[TextRecord]:
    """The records that `kvq compare --output` or `kvq eval --output` wrote; ValueError for other JSON."""
    if file is None:
        return []
    try:
        given = json.loads(files.read(Path(file), LIMIT))
    except ValueError as error:
        raise ValueError(f"--compare {file}: {error}; give what kvq compare --output wrote") from None
    given = [given] if isinstance(given, dict) else given  # the record that lies beside an artifact
    found = text_records(readable(given)) if isinstance(given, list) else None
    if found is None or len(found) < len(given):
        raise ValueError(f"--compare {file}: no list of records; give what kvq compare --output wrote")
    return found


def _give(args: argparse.Namespace, found: Mapping[str, Any], page: Any, name: str, damaged: list[str]) -> int:
    """Print the data, or write the page and print where it is."""
    if args.json:
        print(json.dumps(found, indent=2, default=str))
    if args.out or args.open or not args.json:
        path = Path(args.out or name)
        options.check_output("--out", path)
        data = page(found).encode()
        options.write_output(path, data)
        if not args.json:
            print_record({"page": str(path), "bytes": len(data)}, json=False)
        if args.open and not webbrowser.open(path.absolute().as_uri()):
            print(f"kvq: no browser was found; open {path}", file=sys.stderr)
    for fault in damaged:
        say("kvq", fault)
    return int(bool(damaged))
