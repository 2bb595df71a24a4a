"""Say what a command is doing before there is anything to count. Imports nothing that takes long."""

import sys

from kvq_runtime.cli.table import printable

CLEAR = "\r\x1b[K"


class Status:
    """One line on a terminal's standard error, replaced by the next and cleared at the end; silent elsewhere.

    with Status("kvq-calibrate") as show:
        show("loading torch")
    """

    def __init__(self, program: str, quiet: bool = False):
        self._program, self._on = program, not quiet and sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._on:
            print(f"{CLEAR}{self._program}: {printable(text)} ...", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Leave no line behind."""
        if self._on:
            print(CLEAR, end="", file=sys.stderr, flush=True)
