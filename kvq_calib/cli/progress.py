"""Show the progress of long work on standard error: a bar on a terminal, else a line every 30 seconds. Imports nothing
heavy.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvq_runtime.cli.exit_codes import say

if TYPE_CHECKING:
    from tqdm import tqdm

    from kvq_calib.run.plan import Plan
    from kvq_calib.run.run import Progress

INTERVAL = 30.0  # seconds between two lines


class Lines:
    """A file for tqdm: each state of a bar becomes a line on standard error."""

    encoding = "utf-8"

    def __init__(self, program: str):
        self._program = program

    def write(self, text: str) -> None:
        """Print a state, unless it is blank."""
        if text.strip():
            say(self._program, text.strip())

    def flush(self) -> None:
        """Do nothing: standard error is not buffered."""


def open_bar(program: str, text: str, total: float, quiet: bool, initial: float = 0) -> "tqdm":
    """Open a bar; `total` and `initial` are units of work."""
    from tqdm import tqdm
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would break into ours
    common: dict[str, Any] = {"desc": text, "total": total, "initial": initial, "disable": quiet, "miniters": 0}
    if sys.stderr.isatty():
        return tqdm(**common, leave=False, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left")
    layout = "{desc}: {percentage:.0f}% done, {remaining} left"
    return tqdm(**common, file=Lines(program), mininterval=INTERVAL, leave=False, bar_format=layout)


@contextmanager
def measuring(tokens: int, quiet: bool) -> Iterator[Any]:
    """Show the progress of a measurement; yields the function that takes the number of tokens done."""
    with open_bar("kvq", "measuring", tokens, quiet) as bar:
        yield bar.update


class Bar:
    """A progress listener of a calibration: one bar for all layers, one for each measurement of the whole model."""

    def __init__(self, plan: "Plan", quiet: bool = False):
        from kvq_calib.run import bit_allocation

        self._layers, self._quiet = bit_allocation.count_rounds(plan) * plan.geometry.layers, quiet
        self._bar: tqdm | None = None
        self._title = ""

    def __call__(self, progress: "Progress") -> None:
        if progress.layer < 0:
            self._show(progress.stage, progress.done, progress.total)
            return
        bar = self._show("layers", progress.round * progress.layers + progress.layer, self._layers)
        again = f"round {progress.round}, " if progress.round else ""
        text = f"{again}layer {progress.layer + 1} of {progress.layers}, {progress.stage}"
        bar.set_description_str(f"{text} {progress.done}/{progress.total}", refresh=False)
        bar.update(0)

    def _show(self, title: str, done: int, total: int) -> "tqdm":
        """Advance the bar of this title; open it in place of another one."""
        if self._bar is None or self._title != title:
            self.close()
            self._bar, self._title = open_bar("kvq-calibrate", title, total, self._quiet, done), title
        self._bar.update(done - self._bar.n)
        return self._bar

    def close(self) -> None:
        """Remove what is drawn."""
        if self._bar is not None:
            self._bar.close()
