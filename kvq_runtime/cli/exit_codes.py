"""Exit codes of the commands, and the one place where exceptions become exit codes."""

import os
import sys
import textwrap
from collections.abc import Callable

from kvq_runtime.cli.table import printable
from kvq_runtime.errors import ArtifactError, Conflict, NotFound, spoken
from kvq_runtime.registry.reference import without_secrets

PROPOSED = 6
MEANINGS = {  # docs/commands.md has the same table, which a test compares
    0: "done; also if the very same bytes are published already",
    1: "a check failed (a damaged file, a model that does not match, a fault that doctor found), or the machine did: "
    "disk, memory, device, network; standard error says what to do",
    2: "wrong command line: an unknown command or option, no valid name or reference, invalid settings",
    3: "not found: no such artifact, version, alias, registry, recipe, model, corpus or file",
    4: "conflict: a concurrent change came first, a change contradicts the registry's state, or the same plan is "
    "already running",
    5: "kvq-calibrate: an artifact exceeds its bounds and was not published",
    PROPOSED: "kvq promote, kvq approve: the alias is protected, and waits for approvals",
    130: "interrupted (Ctrl-C); a calibration can be resumed",
}


def _help(codes: list[int]) -> str:
    lines = [textwrap.fill(f"{code:<5}{MEANINGS[code]}", 116, subsequent_indent=" " * 5) for code in codes]
    return "exit codes\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


EXIT_CODES = _help([code for code in MEANINGS if code != 5])
CALIBRATION_EXIT_CODES = _help([code for code in MEANINGS if code != PROPOSED])


def exit_code(error: BaseException) -> int | None:
    """The exit code for an exception; None for a defect of the program, which should end in a traceback."""
    match error:
        case SystemExit():  # argparse: help, version or a usage error, already printed
            return error.code if isinstance(error.code, int) else 2
        case KeyboardInterrupt():
            return 130
        case NotFound():
            return 3
        case Conflict():
            return 4
        case ArtifactError():
            return 1
        case ValueError():
            return 2
        case OSError() | RuntimeError() | ModuleNotFoundError():
            return 1
    return None


def run(program: str, command: Callable[[], int], extras: str = "[calib]", interrupted: str | None = None) -> int:
    """Run a command; returns its exit code, or that of its exception, whose message goes to stderr.

    program      begins every message
    extras       of kvq-runtime, named if a module is not installed
    interrupted  message for Ctrl-C that has none of its own; None prints nothing
    Exceptions without an exit code pass through. A closed stdout, as after `| head`, is exit code 0.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        text = spoken(error) if isinstance(error, OSError) else str(error)
        if isinstance(error, ModuleNotFoundError):
            if (error.name or "kvq").startswith("kvq"):
                raise
            text = f"{error.name} is not installed; in a checkout of kvq: pip install -e '.{extras}'"
        if isinstance(error, KeyboardInterrupt):
            text = text or interrupted
        if text is not None and not isinstance(error, SystemExit):
            say(program, text)
        return code


def say(program: str, message: object) -> None:
    """Print a message to stderr; control characters in it are escaped, tokens and passwords left out."""
    print(f"{program}: {printable(without_secrets(str(message)))}", file=sys.stderr)
