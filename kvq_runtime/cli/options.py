"""Options that several commands share, and checks of the paths that they name. Imports nothing heavy."""

import argparse
import os
import re
import sys
from pathlib import Path

from kvq_runtime.cli.table import printable
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import reference
from kvq_runtime.registry.reference import without_secrets


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong command line in one line, with exit code 2."""

    def error(self, message: str):
        """Print what is wrong, and end with exit code 2."""
        text = f"{self.prog}: {message}; {self.prog} --help explains its arguments"
        print(printable(without_secrets(text)), file=sys.stderr)
        sys.exit(2)


def count(text: str, least: int = 1) -> int:
    """Parse a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}; use a whole number of at least {least}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time span such as 90m, 24h or 7d into seconds."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}; use a number and one of s, m, h, d, as in 24h")
    return int(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def add_registry(command: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--registry`."""
    text = "file:///folder or hf://org (default: $KVQ_REGISTRY, else $KVQ_HOME/registry)"
    command.add_argument("--registry", metavar="URL", help=text)


def check_exists(url: str | None) -> None:
    """Raise NotFound if the registry that an option or $KVQ_REGISTRY names is a folder that does not exist."""
    url = url or os.environ.get("KVQ_REGISTRY")
    if url:
        kind, root = reference.kind_and_root(url)
        if kind == reference.FOLDER and not Path(root).is_dir():
            raise NotFound(f"no registry {url}: there is no folder {root}; publishing to it creates it")


def check_output(option: str, given: str | Path | None, folder: bool = False) -> None:
    """Refuse, before the work, a path that cannot be written.

    folder   expect a folder, which may be new; else a file in an existing folder
    Raises ValueError, or NotFound for a missing folder.
    """
    if given is None:
        return
    path = Path(given)
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if folder and not existing.is_dir():
        raise ValueError(f"{option} {path}: {existing} is a file; name a folder, which may be new")
    if not folder and path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file in it")
    if not folder and not path.parent.is_dir():
        raise NotFound(f"{option} {path}: there is no folder {path.parent}; make it, or name another one")
