"""Report what a command that works long is doing: as bars, and as lines without a terminal.

Imports nothing that takes long.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvq_runtime.cli.table import printable

if TYPE_CHECKING:
    from tqdm import tqdm

    from kvq_calib.run.plan import Plan
    from kvq_calib.run.run import Progress

CLEAR = "\r\x1b[K"
EVERY = 30.0  # seconds between two lines, at the least
KNOWN = 0.02  # of all that must be done before the rest is told: what is loaded first would be taken for its speed


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


class Lines:
    """Progress as plain lines on a standard error that is no terminal, the first at once, then one every 30 seconds
    at most; else silent."""

    def __init__(self, program: str, quiet: bool = False, clock: Callable[[], float] | None = None):
        self._program, self._on, self._clock = program, not quiet and not sys.stderr.isatty(), clock or time.monotonic
        self._said = 0.0
        self._first: tuple[float, float] | None = None

    def __call__(self, text: str, done: float, total: float) -> str:
        """Report what is at work, the share of all that is done, and about how long the rest takes, as since the first
        call. Returns that in words; nothing, as long as it is not known."""
        now = self._clock()
        if self._first is None:
            self._first, self._said = (now, done), now - EVERY
        begun, before = self._first
        known = done - before >= KNOWN * total > 0
        left = f"{spoken((now - begun) * (total - done) / (done - before))} left" if known else ""
        if self._on and done and now - self._said >= EVERY:
            self._said = now
            self.say(", ".join(filter(None, [text, f"{done / total:.0%} done", f"about {left}" if left else ""])))
        return left

    def say(self, text: str) -> None:
        """Write a line now."""
        if self._on:
            print(f"{self._program}: {printable(text)}", file=sys.stderr, flush=True)


def spoken(seconds: float) -> str:
    """A length of time in words, to two digits."""
    name, size = ("second", 1) if seconds < 90 else ("minute", 60) if seconds < 5400 else ("hour", 3600)
    count = seconds / size
    said = f"{count:.1f}" if count < 10 and name == "hour" else f"{count:.0f}"
    return f"{said} {name}{'' if said == '1' else 's'}"


@contextmanager
def progress_bar(tokens: int, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr, or, where that is no terminal, lines: one at once, then every 30 seconds at most."""
    from tqdm import tqdm
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would break into ours
    lines, done = Lines("kvq", quiet), 0

    def update(more: int) -> None:
        nonlocal done
        done += more
        bar.update(more)
        lines("measuring", done, tokens)

    with tqdm(total=tokens, unit="tok", unit_scale=True, disable=quiet or not sys.stderr.isatty()) as bar:
        lines("measuring", 0, tokens)
        yield update


class Bar:
    """A progress listener that draws one bar per layer, and one for the evaluation, on standard error; where that is no
    terminal it writes lines, one every 30 seconds at most.

    Beside the layer's stage stands how long all layers, of all rounds there may be, will still take.

    A layer's work is its forward pass and, for each recipe, decoding its keys and its values, and measuring every
    setting of a budget: each counts its tokens. The first bar is there before the first report, while text is chosen;
    after the last, a line announces plots and cards.
    """

    def __init__(self, plan: "Plan", quiet: bool = False):
        from kvq_calib.run import budget

        self._plan, self._off = plan, quiet or not sys.stderr.isatty()
        self._status = Status("kvq-calibrate", quiet)
        self._all = self._before(budget.most_rounds(plan), 0)
        self._at: tuple[int, int] | None = None
        self._done, self._quiet = 0, quiet
        self._lines = self._whole = Lines("kvq-calibrate", quiet)
        self._bar = self._drawn("choosing the text", self._work(0, 0))
        self._lines.say("choosing the text")

    def __call__(self, progress: "Progress") -> None:
        whole = progress.layer < 0
        again = f"round {progress.round}, " if progress.round else ""
        if (progress.round, progress.layer) != self._at:
            said = progress.stage if whole else f"{again}layer {progress.layer + 1}/{progress.layers}"
            self._next(said, progress.total if whole else self._work(progress.round, progress.layer))
            self._at, self._done = (progress.round, progress.layer), self._before(progress.round, progress.layer)
            self._whole = Lines("kvq-calibrate", self._quiet)  # gradients and the evaluation: each has its own begin
        if whole:
            self._bar.update(progress.tokens)
            self._whole(progress.stage, progress.done, progress.total)
            if progress.done >= progress.total and progress.stage == "evaluation":
                self._bar.close()
                self._status("drawing the plots, writing the cards")
            return
        tokens = progress.tokens or len(self._plan.chunks[progress.done - 1]) * self._plan.seq_len
        self._done += tokens
        where = f"{again}layer {progress.layer + 1} of {progress.layers}, {progress.stage}"
        left = self._lines(where, min(self._done, self._all), self._all)
        self._bar.set_postfix_str(", ".join(filter(None, (progress.stage, left and f"{left} in all"))), refresh=False)
        self._bar.update(tokens)

    def _next(self, said: str, total: int) -> None:
        """Go on with a new bar; the one that stood there before the first report becomes it."""
        if self._at is None:
            self._bar.set_description(said, refresh=False)
            self._bar.reset(total)
        else:
            self._bar.close()
            self._bar = self._drawn(said, total)

    def _drawn(self, said: str, total: int) -> "tqdm":
        from tqdm import tqdm

        return tqdm(total=total, unit="tok", unit_scale=True, disable=self._off, desc=said)

    def _before(self, round: int, layer: int) -> int:
        """Tokens of everything before a layer; of what is measured on the whole model, none."""
        layers = range(self._plan.geometry.layers)
        rounds = sum(self._work(one, each) for one in range(round) for each in layers)
        return rounds + sum(self._work(round, each) for each in range(layer))

    def _work(self, round: int, layer: int) -> int:
        """Tokens of a layer, each as often as it is worked on; in later rounds of the budgets, at most."""
        from kvq_calib.run import budget, share

        plan = self._plan
        if any(map(share.wanted, plan.recipes)):
            if round == 0:
                draft = share.draft(plan)
                return (1 + 2 * len(draft.recipes)) * draft.tokens
            round -= 1
        recipes = len(plan.budgets if round else plan.recipes)
        measured = sum(len(plan.chunks[index]) for index in budget.measured_chunks(plan)) * plan.seq_len
        chosen = [recipe for recipe in plan.recipes if recipe.name in plan.budgets]
        settings = 2 * (1 + len(budget.served_options(plan.geometry))) * len(chosen) if chosen else 0
        return (1 + 2 * recipes) * plan.tokens + settings * measured

    def close(self) -> None:
        """Finish what is drawn."""
        self._bar.close()
        self._status.clear()
