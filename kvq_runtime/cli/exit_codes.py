"""Turn the exceptions of a command into an exit code and one line on standard error."""

import os
import sys
from collections.abc import Callable

from kvq_runtime.cli.table import printable
from kvq_runtime.errors import ArtifactError, Conflict, NotFound, extra, spoken
from kvq_runtime.registry.reference import without_secrets

MEANINGS = {  # docs/commands.md has the same table, which a test compares
    0: "done; also if the very same bytes are published already",
    1: "a check failed (a damaged file, a model that does not match), or the machine did: disk, memory, device, "
    "network; standard error says what to do",
    2: "wrong command line: an unknown command or option, no valid name or reference, invalid settings",
    3: "not found: no such artifact, version, alias, registry, recipe, model, corpus or file",
    4: "conflict: a concurrent change came first, a change contradicts the registry's state, or the same plan is "
    "already running",
    5: "kvq-calibrate: an artifact exceeds its bounds and was not published",
    130: "interrupted (Ctrl-C); a calibration can be resumed",
}
EXIT_CODES = "exit codes\n" + "\n".join(f"    {code:<5}{text}" for code, text in MEANINGS.items())
_EXTRAS = {"ray": "scale", "prefect": "flows"}  # {module: the extra that installs it}; of others `calib`


def exit_code(error: Exception) -> int | None:
    """Return the exit code of an exception; None for a defect of the program, which ends in a traceback."""
    match error:
        case NotFound():
            return 3
        case Conflict():
            return 4
        case ArtifactError():
            return 1
        case ValueError():
            return 2
        case OSError() | RuntimeError():
            return 1
        case ModuleNotFoundError(name=str(name)) if not name.startswith("kvq"):
            return 1
    return None


def run(program: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command and return its exit code; print the message of an exception that has one.

    program       begins every message
    interrupted   message for Ctrl-C, unless the exception has its own
    A closed standard output, as after `| head -1`, is exit code 0.
    """
    try:
        try:
            code = command()
        except SystemExit as ended:  # argparse's: help, version or a usage error, already printed
            code = ended.code if isinstance(ended.code, int) else 2
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 0
    except KeyboardInterrupt as error:
        say(program, str(error) or interrupted)
        return 130
    except Exception as error:
        if (code := exit_code(error)) is None:
            raise
        missing = isinstance(error, ModuleNotFoundError) and error.name
        say(program, f"{missing} is missing; {extra(_EXTRAS.get(missing, 'calib'))}" if missing else spoken(error))
        return code


def say(program: str, message: object) -> None:
    """Print a message on standard error; escape control characters, leave out tokens and passwords."""
    print(f"{program}: {printable(without_secrets(str(message)))}", file=sys.stderr)
