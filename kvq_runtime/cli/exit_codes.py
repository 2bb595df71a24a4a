"""Exit codes of the commands, and the one place where exceptions become exit codes.

Exit codes
    0    done
    1    a check failed: a damaged file, event, lock or model mismatch; a fault found by doctor; the machine failed
    2    usage: unknown command or option, or text that is no reference, name or version
    3    not found: name, version, alias or file
    4    conflict: somebody else's change came first, or a change that contradicts the present state
    130  interrupted
"""

import os
import sys
from collections.abc import Callable

from kvq_runtime.cli.table import printable
from kvq_runtime.errors import ArtifactError, Conflict, NotFound

EXIT_CODES = (__doc__ or "").partition("\n\n")[2]


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
    interrupted  message for Ctrl-C; None prints nothing
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
        text = str(error)
        if isinstance(error, ModuleNotFoundError):
            if (error.name or "kvq").startswith("kvq"):
                raise
            text = f"{error.name} is not installed: pip install 'kvq-runtime{extras}'"
        if isinstance(error, KeyboardInterrupt):
            text = interrupted
        if text is not None and not isinstance(error, SystemExit):
            say(program, text)
        return code


def say(program: str, message: object) -> None:
    """Print a message to stderr; control characters in it are escaped."""
    print(f"{program}: {printable(str(message))}", file=sys.stderr)
