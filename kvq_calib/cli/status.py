"""Report what a command is doing: before there is anything to count, and without a terminal to draw a bar on.

Imports nothing that takes long.
"""

import sys
import time
from collections.abc import Callable

from kvq_runtime.cli.table import printable

CLEAR = "\r\x1b[K"
EVERY = 30.0  # seconds between two lines, at the least


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


class Left:
    """Estimate the time that is left, from the time of the part since the first call; units of any kind."""

    def __init__(self, clock: Callable[[], float] | None = None):
        self._clock = clock or time.monotonic
        self._first: tuple[float, float] | None = None

    def __call__(self, done: float, total: float) -> str:
        """In words; nothing, as long as that is not known."""
        now = self._clock()
        if self._first is None:
            self._first = now, done
        begun, before = self._first
        return f"{spoken((now - begun) * (total - done) / (done - before))} left" if done > before else ""


class Lines:
    """Progress as plain lines on a standard error that is no terminal, one every 30 seconds at most; else silent."""

    def __init__(self, program: str, quiet: bool = False, clock: Callable[[], float] | None = None):
        self._program, self._on, self._clock = program, not quiet and not sys.stderr.isatty(), clock or time.monotonic
        self._left, self._said = Left(self._clock), self._clock()

    def __call__(self, text: str, done: float, total: float) -> None:
        """Report what is at work, the share of all that is done, and about how long the rest takes."""
        left = self._left(done, total)
        if self._on and self._clock() - self._said >= EVERY:
            self._said = self._clock()
            parts = [text, f"{done / total:.0%} done", *([f"about {left}"] if left else [])]
            print(f"{self._program}: {printable(', '.join(filter(None, parts)))}", file=sys.stderr, flush=True)


def spoken(seconds: float) -> str:
    """A length of time in words, to two digits."""
    for name, size, most in (("second", 1, 90), ("minute", 60, 5400), ("hour", 3600, float("inf"))):
        if seconds < most:
            count = seconds / size
            said = f"{count:.1f}" if count < 10 and name == "hour" else f"{count:.0f}"
            return f"{said} {name}{'' if said == '1' else 's'}"
    raise AssertionError("no time is longer than all hours")
