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
    common: dict[str, Any] = {"desc": text, "total": total, "initial": initial, "disable": quiet}
    if sys.stderr.isatty():
        return tqdm(**common, leave=False, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left")
    layout = "{desc}: {percentage:.0f}% done, {remaining} left"
    return tqdm(**common, file=Lines(program), mininterval=INTERVAL, miniters=0, leave=False, bar_format=layout)


@contextmanager
def measuring(tokens: int, quiet: bool) -> Iterator[Any]:
    """Show the progress of a measurement; yields the function that takes the number of tokens done."""
    with open_bar("kvq", "measuring", tokens, quiet) as bar:
        yield bar.update


class Bar:
    """A progress listener of a calibration: one bar for all layers, one for each measurement of the whole model.

    The unit is a layer. A layer's stages (capture, keys and values of each recipe) count alike.
    """

    def __init__(self, plan: "Plan", quiet: bool = False):
        from kvq_calib.run import bit_allocation

        self._layers, self._quiet = bit_allocation.count_rounds(plan) * plan.geometry.layers, quiet
        self._stages = 1 + 2 * len(plan.recipes)
        self._bar: tqdm | None = None
        self._whole, self._at, self._seen = "", (-1, -1), list[str]()

    def __call__(self, progress: "Progress") -> None:
        if progress.layer < 0:
            if self._bar is None or self._whole != progress.stage:
                self._open(progress.stage, progress.total)
                self._whole = progress.stage
            assert self._bar is not None
            self._bar.update(progress.done - self._bar.n)
            return
        if (progress.round, progress.layer) != self._at:
            self._at, self._seen = (progress.round, progress.layer), []
        if progress.stage not in self._seen:
            self._seen.append(progress.stage)
        finished = progress.round * progress.layers + progress.layer
        within = min(0.99, (len(self._seen) - 1 + progress.done / progress.total) / self._stages)
        if self._bar is None or self._whole:
            self._open("layers", self._layers, finished)
            self._whole = ""
        assert self._bar is not None
        again = f"round {progress.round}, " if progress.round else ""
        text = f"{again}layer {progress.layer + 1} of {progress.layers}, {progress.stage}"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(max(0.0, finished + within - self._bar.n))

    def _open(self, text: str, total: float, initial: float = 0) -> None:
        self.close()
        self._bar = open_bar("kvq-calibrate", text, total, self._quiet, initial)

    def close(self) -> None:
        """Remove what is drawn."""
        if self._bar is not None:
            self._bar.close()
