"""Parse a command line; report in one line what is wrong with it. Options that several commands have.

Imports nothing that takes long.
"""

import argparse
import difflib
import errno
import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq_runtime.cli.exit_codes import EXIT_CODES
from kvq_runtime.cli.table import printable
from kvq_runtime.disk import files
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import reference
from kvq_runtime.registry.reference import without_secrets

EXPLAINED = """\
recipes
    NAME                       a recipe that comes with kvq (kvq recipes lists them)
    FILE.json                  one of your own: what kvq recipes NAME --json prints, edited
    NAME+PATH=VALUE+...        either, with other settings; --set PATH=VALUE is the same for all recipes of a command
    PATH is position, window.recent, key.quantize.bits, value.predict.ridge, key.feedback (a kind, or none),
    layers.0.key.quantize.bits, policies.heavy.share, name, ...: kvq recipes NAME prints all of them. A wrong one is
    answered with what is allowed there. A changed recipe has a name of its own: squat-2bit-key.feedback.rank-60."""


class Parser(argparse.ArgumentParser):
    """argparse's own, with a line in place of the usage for a wrong command line; exit code 2."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]  # argparse's own is overloaded
        """Parse; what no argument takes is refused here, where the options of the command are known."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._guess(rest)}")
        return found, rest

    def error(self, message: str):
        """Print what is wrong, and end with exit code 2."""
        said = f"{self.prog}: {message}; {self.prog} --help explains its arguments"
        print(printable(without_secrets(said)), file=sys.stderr)
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:  # argparse's own passes over a full disk
        (file or sys.stderr).write(message)

    def _guess(self, rest: Sequence[str]) -> str:
        """Options that are written nearly as those that were not known, as the end of a sentence."""
        known = [option for action in self._actions for option in action.option_strings]
        wrong = [one.partition("=")[0] for one in rest if one.startswith("--")]
        near = [option for one in wrong for option in difflib.get_close_matches(one, known, 1)]
        return f"; did you mean {' '.join(near)}" if near else ""


def command(subparsers: Any, name: str, idea: str, examples: str, json: bool = True) -> argparse.ArgumentParser:
    """Add a command, with what all have in common; --json unless it prints no data."""
    added = subparsers.add_parser(
        name,
        help=idea,
        description=f"{idea[0].upper()}{idea[1:]}.",
        epilog=f"{examples}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json:
        added.add_argument("--json", action="store_true", help="print JSON")
    return added


def count(text: str, least: int = 1) -> int:
    """The type of an option: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}; use a whole number of at least {least}")
    return int(text)


def seconds(text: str) -> float:
    """Seconds of a time span written as 90m, 24h or 7d."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}; use a number and one of s, m, h, d, as in 24h")
    return int(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def png(text: str) -> str:
    """The type of an option: the path of a picture."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r}; pictures are written as PNG: use a path that ends in .png")
    return text


def registry(command: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--registry`."""
    text = "file:///folder or hf://org"
    default = "(default: $KVQ_REGISTRY, else $KVQ_HOME/registry)"
    command.add_argument("--registry", metavar="URL", help=f"{text} {default}")


def add_settings(command: argparse.ArgumentParser | argparse._ArgumentGroup, whose: str) -> None:
    """Add `--set`."""
    command.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE",
        help=f"another setting {whose}, as in key.feedback.rank=60 or window.recent=32; repeat for several",
    )  # fmt: skip


def check_named(args: argparse.Namespace) -> None:
    """Check the registry that a command names, or $KVQ_REGISTRY; the default one may be missing: it is empty.

    A reference may be a path, or name a registry of its own: only looking it up tells whether the variable's is asked.
    """
    named = getattr(args, "where", None) or getattr(args, "registry", None)
    if named is None and getattr(args, "reference", None) is None:
        named = os.environ.get("KVQ_REGISTRY")
    if named is not None:
        check_there(named)


def check_there(url: str) -> None:
    """Raise NotFound for the address of a folder that is not there."""
    kind, root = reference.kind_and_root(url)
    if kind == reference.FOLDER and not Path(root).is_dir():
        raise NotFound(f"no registry {url}: there is no folder {root}; what publishes into it makes it")


def check_output(option: str, given: str | Path | None, folder: bool = False, makes: bool = False) -> None:
    """Refuse a path that nothing can be written to, before the work that would be lost; None is none.

    folder   it is to be a folder, which may be new; else a file, in a folder that is there
    makes    the folder of a file may be new too
    Raises ValueError, NotFound for a folder that is missing, PermissionError.
    """
    if given is None:
        return
    path = Path(given)
    if not folder and _stream(path) is not None:
        return
    if not folder and path.is_symlink():  # which is followed
        path = path.resolve()
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if folder and not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is a file; name a folder, which may be new")
    if not folder and path.is_dir():
        raise ValueError(f"{option} {path}: a folder, and a file is wanted; name one in it")
    if makes:
        return check_output(option, path.parent, folder=True)
    if not folder and not path.parent.is_dir():
        raise NotFound(f"{option} {path}: there is no folder {path.parent}; make it, or name another one")
    into = not folder and path.exists() and not path.is_file()  # a device or a pipe, into which it is written
    place = there if folder or into else path.absolute().parent  # in which a file's draft is made
    if not os.access(place, os.W_OK | os.X_OK * (not into)):
        raise PermissionError(f"{option} {path}: {place} may not be written by this user; name another path")


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user named, whole or not at all, with the mode that it has, or that new ones get; into a
    device or a pipe, never over it, and into a file that is a mount of its own, as containers have them: nothing can
    take its place, so that an interrupt may leave a part. Links of the user's own are followed.

    Raises PermissionError for a link of somebody else's, RuntimeError for a pipe whose reader went too soon.
    """
    if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid()) and _stream(path) is None:
        raise PermissionError(f"{path} is a link of another user's; name another path")
    try:
        if (number := _stream(path)) is not None:
            sys.stdout.flush()
            with open(os.dup(number), "wb") as file:
                file.write(data)
        elif path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except BrokenPipeError:
        raise RuntimeError(f"{path}: its reader went before all was written") from None
    except OSError as error:
        error.filename = error.filename or str(path)  # a write does not say where
        raise


def _replace(path: Path, data: bytes) -> None:
    try:
        files.replace(path, data, path.parent, _mode(path))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        path.write_bytes(data)


def _stream(path: Path) -> int | None:
    """The number of a stream that is open already, by the name that the system has for it: what wrote goes on there."""
    names = {"stdin": 0, "stdout": 1, "stderr": 2}
    folder, name = str(path.parent), path.name
    if folder in ("/dev/fd", "/proc/self/fd") and name.isdecimal():
        return int(name)
    return names.get(name) if folder == "/dev" else None


def _mode(path: Path) -> int:
    """The mode of a file, or of one that would be made now."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
