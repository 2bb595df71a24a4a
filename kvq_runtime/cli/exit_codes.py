"""Exit codes of the commands, and the one place where exceptions become exit codes."""

import atexit
import io
import logging
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from kvq_runtime.cli.table import printable
from kvq_runtime.errors import ArtifactError, Conflict, NotFound, spoken
from kvq_runtime.registry.reference import without_secrets

MEANINGS = {  # docs/commands.md has the same table, which a test compares
    0: "done; also if the very same bytes are published already",
    1: "a check failed (a damaged file, a model that does not match, a fault that doctor found), or the machine did: "
    "disk, memory, device, network; standard error says what to do",
    2: "wrong command line: an unknown command or option, no valid name or reference, invalid settings",
    3: "not found: no such artifact, version, alias, registry, recipe, model, corpus or file",
    4: "conflict: a concurrent change came first, a change contradicts the registry's state, or the same plan is "
    "already running",
    5: "kvq-calibrate: an artifact exceeds its bounds and was not published",
    130: "interrupted (Ctrl-C); a calibration can be resumed",
}


def _help(codes: list[int]) -> str:
    lines = [textwrap.fill(f"{code:<5}{MEANINGS[code]}", 116, subsequent_indent=" " * 5) for code in codes]
    return "exit codes\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


EXIT_CODES = _help([code for code in MEANINGS if code != 5])
CALIBRATION_EXIT_CODES = _help([*MEANINGS])


def exit_code(error: BaseException) -> int | None:
    """The exit code for an exception; None for a defect of the program, which should end in a traceback."""
    match error:
        case SystemExit():
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


_IMPORTS = "<frozen importlib._bootstrap"
_loaded: list[bool] = []


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed ones, or none
        sys.stdout.flush()
        sys.stderr.flush()


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"  # a write does not say where
        raise


def loaded() -> None:
    """Say that a command's modules are loaded: Ctrl-C from now on lets it tidy up, in what it imports later too."""
    _loaded.append(True)


class _Said(io.FileIO):
    """Standard error that stops no work: a reader that has gone, a full disk or a lost terminal takes what follows."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def _streams() -> None:
    """Give the process the three streams that it may lack, so that no file gets their numbers; let standard error
    survive its reader."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed, and the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    raw = io.BufferedWriter(_Said(2, "w", closefd=False))
    kind = sys.stderr and sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(raw, kind, "backslashreplace", line_buffering=True)


def program(name: str, command: Callable[[], int]) -> int:
    """Run the command of a process of its own, which then ends at once.

    Python would take every module apart first: with torch and transformers that is seconds, after Ctrl-C too. Threads
    are waited for, logs are closed, and what is registered for the end after this call is done, as ever; not what was
    before. Ctrl-C while it imports its modules ends it there: torch goes on without numpy then, and fails much later.
    """
    ended: list[int] = []
    _streams()

    def leave() -> None:
        if ended:
            logging.shutdown()
            _flush()
            os._exit(ended[0])

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _loaded and any(one.f_code.co_filename.startswith(_IMPORTS) for one, _ in traceback.walk_stack(frame)):
            _flush()
            say(name, "interrupted while modules were loaded")
            os._exit(exit_code(KeyboardInterrupt()) or 1)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, interrupt)
    atexit.register(leave)  # the first to be registered is the last to run
    ended.append(command())
    return ended[0]


def run(program: str, command: Callable[[], int], extras: str = "[calib]", interrupted: str | None = None) -> int:
    """Run a command; returns its exit code, or that of its exception, whose message goes to stderr.

    program      begins every message
    extras       of kvq-runtime, named if a module is not installed
    interrupted  message for Ctrl-C that has none of its own; None prints nothing
    Exceptions without an exit code pass through. A closed stdout, as after `| head`, is exit code 0.
    """
    try:
        try:
            code = command()
        except SystemExit as ended:  # argparse: help, version or a usage error, already printed
            code = exit_code(ended) or 0
        _flush_output()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        text = spoken(error)
        if isinstance(error, ModuleNotFoundError):
            if (error.name or "kvq").startswith("kvq"):
                raise
            text = f"{error.name} is not installed; in a checkout of kvq: pip install -e '.{extras}'"
        if isinstance(error, KeyboardInterrupt):
            text = text or interrupted
        if text is not None:
            say(program, text)
        return code


def say(program: str, message: object) -> None:
    """Print a message to stderr; control characters in it are escaped, tokens and passwords left out."""
    print(f"{program}: {printable(without_secrets(str(message)))}", file=sys.stderr)
