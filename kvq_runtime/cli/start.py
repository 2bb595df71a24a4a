"""Begin `kvq` and `kvq-calibrate`: Ctrl-C ends them without a traceback while their modules are imported, too.

What this module imports is there already: before it runs, an interrupt is Python's own.
"""

import os
from contextlib import suppress
from importlib import import_module


def kvq() -> int:
    """Run `kvq`; the process ends with it."""
    return _program("kvq", "kvq_runtime.cli.main")


def kvq_calibrate() -> int:
    """Run `kvq-calibrate`; the process ends with it."""
    return _program("kvq-calibrate", "kvq_calib.cli.calibrate")


def _program(name: str, module: str) -> int:
    try:
        program = import_module(module).program
    except KeyboardInterrupt:
        with suppress(OSError):  # a stream that is closed or full
            os.write(2, f"{name}: interrupted while modules were loaded\n".encode())
        os._exit(130)
    return program()
