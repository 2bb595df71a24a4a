"""`kvq completion`: the script by which a shell completes commands, options and files."""

import argparse
from importlib import import_module

from kvq_runtime.errors import extra


def completion(args: argparse.Namespace) -> int:
    """Print the script for a shell: of `kvq` and, where it is installed, of `kvq-calibrate`."""
    try:
        shtab = import_module("shtab")
    except ModuleNotFoundError:
        raise RuntimeError(f"kvq completion needs shtab; {extra('completion')}") from None
    print("\n".join(shtab.complete(_marked(one, shtab), args.shell) for one in _parsers()))
    return 0


def _parsers() -> list[argparse.ArgumentParser]:
    """The command lines: `calibrate` is one of the commands, and a command of its own."""
    from kvq_runtime.cli import main

    top = main.parser()
    try:
        calibrate = import_module("kvq_calib.cli.calibrate")
    except ModuleNotFoundError:
        return [top]
    main.commands(top)["calibrate"] = calibrate.parser()
    return [top, calibrate.parser()]


def _marked(top: argparse.ArgumentParser, shtab) -> argparse.ArgumentParser:
    """The command line, with the mark of shtab where an argument takes a file or a folder."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _marked(command, shtab)
        elif action.choices is None and isinstance(action.metavar, str):
            kinds = {"DIR": shtab.DIRECTORY, "FOLDER": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE}
            found = [mark for kind, mark in kinds.items() if kind in action.metavar]
            if found or action.dest == "model":
                action.complete = found[0] if found else shtab.FILE  # type: ignore[attr-defined]
    return top
