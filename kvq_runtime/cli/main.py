"""`kvq`: list, check, copy and promote artifacts in a registry. Needs no extra.

This module parses arguments; a command's own module is imported when it runs, so that `kvq --help` does not wait for
torch.
"""

import argparse
import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from kvq_runtime import __version__
from kvq_runtime.cli import exit_codes, options
from kvq_runtime.cli.exit_codes import EXIT_CODES
from kvq_runtime.cli.options import EXPLAINED, Parser, add_settings, count, seconds
from kvq_runtime.errors import extra
from kvq_runtime.registry.reference import GRACE, PRODUCTION, SEARCHED

EPILOG = f"""\
references
    NAME                production, else the newest version that is not yanked
    NAME@1.2.0          a version
    NAME@production     an alias
    NAME@sha256:HEX     bytes
    hf://ORG/NAME@...   each of these, in that registry
    PATH.safetensors    a file (show, verify, diff)

{EXPLAINED}

examples
    kvq recipes                                        which to take, and what families there are
    kvq recipes --bits 2.5 --unfitted                  those of at most 2.5 bits that need no calibration
    kvq recipes aqua-2bit                              every setting of one
    kvq recipes aqua-2bit --set window.recent=32       the same with another setting
    kvq bytes aqua-2bit --model llama-3.1-8b           what a cache of it would hold, all bytes
    kvq list                                           artifacts in your registry
    kvq show qwen2.5-7b-aqua-2bit                      settings, provenance, errors, evaluations
    kvq promote qwen2.5-7b-aqua-2bit@1.2.0             make it production
    kvq rollback qwen2.5-7b-aqua-2bit                  undo that
    kvq pull qwen2.5-7b-aqua-2bit -o out --lock kvq.lock
    kvq verify qwen2.5-7b-aqua-2bit --lock kvq.lock    every check, against the lock
    kvq copy qwen2.5-7b-aqua-2bit@1.2.0 hf://my-org    to a Hugging Face Hub
    kvq search --corpus redpajama hf://my-org          versions fitted on a corpus, to a model, a revision
    kvq list --json | jq '.[].name'                    every table can be printed as JSON

{EXIT_CODES}
environment
    KVQ_HOME        folder of all data of kvq, default ~/.kvq; the registry is its folder registry
    KVQ_REGISTRY    the registry, file:///folder or hf://org; --registry
                    has precedence
    HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE    of huggingface_hub: address, token, cache, no network
"""


SHORT = """\
usage: kvq COMMAND ...

    kvq recipes                       which recipe to take
    kvq calibrate --model M           fit one to a model, measure it, publish it
    kvq list, kvq show NAME           what is published
    kvq promote NAME@1.0.0            make a version the one that its name means
    kvq report NAME --open            a page of all that is known of it
    kvq eval, kvq compare             measure one recipe, or many

kvq --help has all commands; kvq COMMAND --help what one takes."""


def program() -> int:
    """Run the command line of this process, which ends with it."""
    return exit_codes.program("kvq", main)


def main(argv: list[str] | None = None) -> int:
    """Run a command, by default that of the command line; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(SHORT, file=sys.stderr)
        return 2
    if argv[0] != "calibrate":
        return exit_codes.run("kvq", lambda: _run(_parsed(argv)), interrupted="interrupted")
    if (calibrate := _calibrate()) is None:
        exit_codes.say("kvq", f"calibrate: {extra('calib')}")
        return 1
    return calibrate.main(argv[1:])


def _calibrate() -> Any:
    """The module of `kvq-calibrate`, which `kvq calibrate` is; None where it is not installed."""
    try:
        return import_module("kvq_calib.cli.calibrate")
    except ModuleNotFoundError:
        return None


def _parsed(given: list[str]) -> argparse.Namespace:
    """The arguments; a command that is not there is answered with the nearest one that is."""
    top = parser()
    names = list(commands(top))
    if not given[0].startswith("-") and given[0] not in names:
        near = difflib.get_close_matches(given[0], names, n=1, cutoff=0.5)
        hint = f"did you mean kvq {near[0]}? " if near else ""
        raise ValueError(f"there is no command {given[0]!r:.80}; {hint}kvq --help lists all")
    return top.parse_args(given)


def commands(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The command line of each command of `parser`."""
    (found,) = (action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return found


def _run(args: argparse.Namespace) -> int:
    """Run the command that was parsed; our warnings go to stderr, those of libraries are dropped."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
    logging.getLogger("huggingface_hub.utils._http").addFilter(_RETRIES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: exit_codes.say("warning", message)
        return args.run(args)


def _first_retry() -> Callable[[logging.LogRecord], bool]:
    """A filter of the library's two lines a retry: one of ours for the first, none for the others."""
    told = []

    def first(record: logging.LogRecord) -> bool:
        if "thrown while requesting" not in record.getMessage() and "Retry " not in record.getMessage():
            return True
        told.append(record)
        record.msg, record.args = "no answer from the Hub; trying again, for up to a minute", ()
        return len(told) == 1

    return first


_RETRIES = _first_retry()


def _run_own(module: str, function: str, args: argparse.Namespace) -> int:
    """Run a command of this package; only its own module is imported."""
    options.check_named(args)
    return getattr(import_module(f"kvq_runtime.cli.{module}"), function)(args)


def parser() -> argparse.ArgumentParser:
    """The command line, with the commands of installed packages (entry points of the group kvq.commands)."""
    top = Parser(
        "kvq",
        description="Find, check, copy and promote artifacts for compressed KV caches.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvq-runtime {__version__}")
    subparsers = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    def add(
        name: str, module: str, idea: str, example: str, registry: bool = True, function: str = ""
    ) -> argparse.ArgumentParser:
        """Add a command with what all have in common; its function, of its own name if not said, is in the module."""
        command = options.command(subparsers, name, idea, f"example\n    {example}", json=True)
        command.set_defaults(run=lambda args: _run_own(module, function or name, args))
        if registry:
            options.registry(command)
        return command

    command = add("list", "names", "names in a registry", "kvq list --json", function="list_names")
    _where(command)
    text = "versions by name, recipe, model or corpus"
    command = add("search", "names", text, "kvq search --model qwen2.5", function="search_names")
    _where(command)
    for field in SEARCHED:
        command.add_argument(f"--{field}", metavar="PATTERN", help=f"a part of the {field}, or all of it with * and ?")
    command = add("show", "version", "settings, provenance, errors and evaluations of a version", "kvq show NAME@1.2.0")
    _reference(command, "NAME, NAME@VERSION, NAME@ALIAS, NAME@sha256:HEX, a .safetensors file or a folder with one")
    _lock(command, "the reference must be the one that this lock file pins")
    text = "copy a version and its files, checked"
    command = add("pull", "version", text, "kvq pull NAME@1.2.0 -o out --lock kvq.lock")
    _reference(command, "NAME, NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    command.add_argument("-o", "--output", metavar="DIR", help="folder to write to (default: NAME)")
    _lock(command, "write a lock file that pins what was pulled")
    _option(command, "--locked", "FILE", "pull what this lock file pins, or fail")
    _option(command, "--key", "FILE", "public key: require its signature, now and whenever the lock file is used")
    _option(command, "--lowest", "VERSION", "with --key: accept no version older than this")
    _flag(command, "--follow", "with --key: the lock file pins no version, and the alias may move")
    _flag(command, "--no-policy", "drop what the lock file that is replaced demands of signatures")
    _flag(command, "--force", "replace files of the same names that are not of NAME")
    command = add(
        "verify", "version", "load an artifact with every check", "kvq verify out/kvq.safetensors --lock kvq.lock"
    )
    _reference(command, "a reference, a .safetensors file or a folder that kvq pull wrote")
    _lock(command, "check digest and size against this lock file too")
    _option(command, "--key", "FILE", "public key: check its signature of name, version and sha256")
    text = "sign a version with an elliptic-curve key (extra `sign`; $KVQ_KEY_PASSWORD)"
    command = add("sign", "version", text, "kvq sign NAME@1.2.0 --key private.pem")
    _reference(command, "NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    _option(command, "--key", "FILE", "private key, PEM", required=True)
    text = "copy a version, or all versions of a name, to another registry"
    command = add("copy", "transfer", text, "kvq copy NAME@1.2.0 hf://my-org --dry-run")
    _reference(command, "NAME, hf://ORG/NAME, or a version of it")
    _to(command)
    command = add("promote", "names", "point an alias to a version", "kvq promote NAME@1.2.0 --expect 1.1.0")
    _reference(command, "NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    _alias(command)
    _option(command, "--expect", "VERSION", 'fail with 4 unless the alias has this version now ("none": is new)')
    _flag(command, "--force", "also a version that is too lossy")
    command = add("rollback", "names", "point an alias to the version it had before", "kvq rollback NAME")
    command.add_argument("name", metavar="NAME", help="or hf://ORG/NAME")
    _alias(command)
    command = add("yank", "names", "withdraw a version", "kvq yank NAME@1.2.0 --reason 'wrong corpus'")
    _reference(command, "NAME@VERSION or NAME@sha256:HEX; it stays, and is chosen only by number or digest")
    _option(command, "--reason", "TEXT", "why, in one line", required=True)
    command = add("history", "names", "every change of a name", "kvq history NAME")
    command.add_argument("name", metavar="NAME", help="or hf://ORG/NAME")
    command = add("diff", "diff", "what differs between two artifacts", "kvq diff NAME@1.1.0 NAME@1.2.0")
    command.add_argument("a", metavar="A", help="a reference or a .safetensors file")
    command.add_argument("b", metavar="B", help="a reference or a .safetensors file")
    _flag(command, "--layers", "also errors of the fit by layer, and every tensor")
    text = "remove temporary files, and blobs or files that no event names"
    command = add("gc", "names", text, "kvq gc --grace 7d --dry-run")
    _where(command)
    text = f"minimum age, as in 90m, {GRACE / 3600:.0f}h (default) or 7d"
    _option(command, "--grace", "TIME", text, type=seconds, default=GRACE)
    _flag(command, "--dry-run", "print what would be removed")
    _where(add("doctor", "names", "check a registry, and say what to do about faults", "kvq doctor"))
    text = "which recipe to take, and all that come with kvq"
    command = add("recipes", "recipes", text, "kvq recipes --bits 2-2.5 --unfitted", registry=False)
    command.add_argument("name", metavar="RECIPE", nargs="?", help="all settings of this one; or a family")
    _option(command, "--family", "NAME", "those of one family")
    _option(command, "--bits", "B|A-B", "those of at most B bits per element, or A to B", type=bits_range)
    group = command.add_mutually_exclusive_group()
    group.add_argument("--fitted", action="store_true", default=None, help="those that take a calibration")
    group.add_argument("--unfitted", action="store_false", dest="fitted", help="those that take none")
    _flag(command, "--all", "each recipe instead of a line a family")
    add_settings(command, "of it")
    text = "all bytes of a cache at 8k, 32k and 131k tokens, computed"
    example = "kvq bytes aqua-2bit kivi-2bit --model llama-3.1-8b"
    command = add("bytes", "recipes", text, example, registry=False, function="held")
    command.add_argument("recipes", metavar="RECIPE", nargs="+", help="names, FILE.json, either with +PATH=VALUE")
    add_settings(command, "of every recipe")
    command.add_argument("--model", metavar="NAME", action="append",
                         help="of the catalog, all, a folder with config.json, or layers x KV heads x "
                         "head size as in 28x4x128; repeat for several (default: qwen2.5-7b)")  # fmt: skip
    command.add_argument("--tokens", metavar="T", type=count, nargs="+", help="a row (default: 8192 32768 131072)")
    command.add_argument("--batch", metavar="B", type=count, default=1, help="rows (default: 1)")
    subparsers.add_parser("calibrate", help="fit recipes to a model, measure them, publish them: kvq-calibrate")
    for command in sorted(metadata.entry_points(group="kvq.commands"), key=lambda command: command.name):
        try:
            command.load()(subparsers)
        except ModuleNotFoundError:  # the package that offers the command is not installed
            continue
    return top


def _where(command: argparse.ArgumentParser) -> None:
    command.add_argument("where", metavar="REGISTRY", nargs="?", help="as --registry")


def _to(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "to",
        metavar="TO",
        help="the registry to copy to: hf://org or file:///folder",
    )
    _flag(command, "--private", "create private repositories on a Hub")
    _flag(command, "--dry-run", "check everything, write nothing, print what would be done")


def _option(command: argparse.ArgumentParser, name: str, metavar: str, text: str, **more: Any) -> None:
    command.add_argument(name, metavar=metavar, help=text, **more)


def _flag(command: argparse.ArgumentParser, name: str, text: str) -> None:
    command.add_argument(name, action="store_true", help=text)


def _reference(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("reference", metavar="REFERENCE", help=text)


def _lock(command: argparse.ArgumentParser, text: str) -> None:
    _option(command, "--lock", "FILE", text)


def _alias(command: argparse.ArgumentParser) -> None:
    command.add_argument("--alias", default=PRODUCTION, help=f"which alias (default: {PRODUCTION})")


def bits_range(text: str) -> tuple[float, float]:
    """The type of --bits: B, at most B bits; or A-B, from A to B."""
    found = re.fullmatch(r"(?:(\d+(?:\.\d+)?)-)?(\d+(?:\.\d+)?)", text)
    low, high = (float(found[1] or 0), float(found[2])) if found else (1.0, 0.0)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r}; use bits per element: 2.5, at most so many, or a range, 2-2.5")
    return low, high


if __name__ == "__main__":
    sys.exit(program())
