"""`kvq`: list, check, copy and promote artifacts in a registry. Needs no extra.

This module parses arguments. The module of a command is imported when it runs, so that `kvq list` imports no torch.
"""

import argparse
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

import kvq_runtime
from kvq_runtime.cli import exit_codes
from kvq_runtime.cli.exit_codes import EXIT_CODES
from kvq_runtime.cli.options import Parser, add_registry, count
from kvq_runtime.registry.reference import PRODUCTION

EPILOG = f"""\
references
    NAME                production, else the newest version that is not yanked
    NAME@1.2.0          a version; NAME@production: an alias; NAME@sha256:HEX: bytes
    hf://ORG/NAME@...   each of these, in that registry
    PATH.safetensors    a file (show, verify)

examples
    kvq recipes                                        what to choose among
    kvq bytes aqua-2bit --model llama-3.1-8b           the memory that a cache takes
    kvq calibrate --model M                            fit a recipe, measure it, publish it (kvq-calibrate)
    kvq show qwen2.5-7b-aqua-2bit                      settings, provenance, errors, evaluations
    kvq promote qwen2.5-7b-aqua-2bit@1.2.0             make it production; kvq rollback undoes that
    kvq pull qwen2.5-7b-aqua-2bit -o out --lock kvq.lock

{EXIT_CODES}

docs/commands.md explains every command and the environment variables."""

VERSION = "NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX"


def main(argv: list[str] | None = None) -> int:
    """Run a command, by default that of the command line; return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_codes.run("kvq", lambda: _run(argv))


def _run(argv: list[str]) -> int:
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
    if argv == ["--version"]:
        print(f"kvq-runtime {kvq_runtime.__version__}")  # which takes long to look up
        return 0
    if argv[:1] == ["calibrate"]:
        return import_module("kvq_calib.cli.calibrate").main(argv[1:])
    top, commands = parser()
    if not argv or argv[0] not in commands.choices:
        commands.add_parser("calibrate", help="fit recipes to a model, measure them, publish them: kvq-calibrate")
        with suppress(ModuleNotFoundError):  # the runtime alone is installed
            import_module("kvq_calib.cli.commands").add(commands)
    if not argv:
        top.print_help(sys.stderr)
        return 2
    args = top.parse_args(argv)
    with warnings.catch_warnings():  # ours go to stderr in a line; those of libraries are dropped
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: exit_codes.say("warning", message)
        return args.run(args)


def parser() -> tuple[Parser, Any]:
    """Return the command line of the runtime's own commands, and its subparsers."""
    layout = argparse.RawDescriptionHelpFormatter
    top = Parser("kvq", description="Find, check, copy and promote artifacts.", epilog=EPILOG, formatter_class=layout)
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    def add(name: str, module: str, idea: str, example: str, registry: bool = True) -> argparse.ArgumentParser:
        """Add a command, which the function of its name in the module runs."""
        command = commands.add_parser(name, help=idea, description=idea, epilog=f"example: {example}")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=lambda args: getattr(import_module(f"kvq_runtime.cli.{module}"), f"run_{name}")(args))
        if registry:
            add_registry(command)
        return command

    add("list", "names", "list the names in a registry", "kvq list --json")
    command = add("show", "version", "show settings, provenance, errors and evaluations", "kvq show NAME@1.2.0")
    command.add_argument("reference", metavar="REF", help=f"NAME, {VERSION}, a file, or a folder of kvq pull")
    command.add_argument("--lock", metavar="FILE", help="require the file that this lock file pins")
    text = "also digests, fingerprint, environment, and quantiles of the fit's errors"
    command.add_argument("--verbose", action="store_true", help=text)
    command = add("history", "names", "list every change of a name", "kvq history NAME")
    command.add_argument("name", metavar="NAME", help="NAME or hf://ORG/NAME")

    command = add("pull", "version", "copy a version and its files, checked", "kvq pull NAME@1.2.0 --lock kvq.lock")
    command.add_argument("reference", metavar="REF", help=f"NAME or {VERSION}")
    command.add_argument("-o", "--output", metavar="DIR", help="folder to write to (default: NAME)")
    command.add_argument("--lock", metavar="FILE", help="write a lock file that pins what was pulled")
    command.add_argument("--locked", metavar="FILE", help="pull what this lock file pins, or fail")
    command.add_argument("--key", metavar="FILE", help="public key: require its signature, now and by --lock")
    command = add("verify", "version", "load an artifact with every check", "kvq verify out --lock kvq.lock")
    command.add_argument("reference", metavar="REF", help="a reference, a file, or a folder that kvq pull wrote")
    command.add_argument("--lock", metavar="FILE", help="check digest and size against this lock file too")
    command = add("sign", "version", "sign a version (extra `sign`)", "kvq sign NAME@1.2.0 --key private.pem")
    command.add_argument("reference", metavar="REF", help=VERSION)
    text = "private elliptic-curve key, PEM; its password is $KVQ_KEY_PASSWORD"
    command.add_argument("--key", metavar="FILE", required=True, help=text)

    command = add("copy", "names", "copy versions to another registry", "kvq copy NAME@1.2.0 hf://my-org")
    command.add_argument("reference", metavar="REF", help="NAME for all its versions, or one of them")
    command.add_argument("to", metavar="URL", help="the registry to copy to: hf://org or file:///folder")
    command.add_argument("--private", action="store_true", help="create private repositories on a Hub")
    command = add("promote", "names", "point an alias to a version", "kvq promote NAME@1.2.0 --expect 1.1.0")
    command.add_argument("reference", metavar="REF", help=VERSION)
    command.add_argument("--alias", default=PRODUCTION, help=f"which alias (default: {PRODUCTION})")
    text = 'fail with 4 unless the alias has this version now ("none": is new)'
    command.add_argument("--expect", metavar="VERSION", help=text)
    command.add_argument("--force", action="store_true", help="also a version that is too lossy or not measured")
    command = add("rollback", "names", "point an alias to the version it had before", "kvq rollback NAME")
    command.add_argument("name", metavar="NAME", help="NAME or hf://ORG/NAME")
    command.add_argument("--alias", default=PRODUCTION, help=f"which alias (default: {PRODUCTION})")
    command = add("yank", "names", "withdraw a version", "kvq yank NAME@1.2.0 --reason 'wrong corpus'")
    command.add_argument("reference", metavar="REF", help="NAME@VERSION or NAME@sha256:HEX; it still loads by these")
    command.add_argument("--reason", metavar="TEXT", required=True, help="why, in one line")

    command = add("recipes", "recipes", "list recipes, or show one", "kvq recipes aqua-2bit", False)
    command.add_argument("name", metavar="RECIPE", nargs="?", help="show all its settings; or list a family")
    command = add("bytes", "recipes", "compute the memory of a cache", "kvq bytes aqua-2bit kivi-2bit", False)
    command.add_argument("recipes", metavar="RECIPE", nargs="+", help="names, FILE.json, either with +PATH=VALUE")
    text = (
        "of the catalog, a folder with config.json, or layers x KV heads x head size as in 28x4x128; repeat for several"
    )
    command.add_argument("--model", metavar="NAME", action="append", help=f"{text} (default: qwen2.5-7b)")
    command.add_argument("--tokens", metavar="T", type=count, nargs="+", help="a row (default: 8192 32768 131072)")
    command.add_argument("--batch", metavar="B", type=count, default=1, help="rows (default: 1)")
    return top, commands


if __name__ == "__main__":
    sys.exit(main())
