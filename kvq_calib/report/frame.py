"""Frame a picture: axes without ornament, plain numbers at ticks, a caption below, the bytes of a PNG."""

import io
import json
import math
import textwrap
import unicodedata
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

DPI = 130
INK = "0.35"
SAID = "said:"  # before what is said of a mark, in its identifier
_WORDS = 8.5  # points of a caption's letters
P = ParamSpec("P")


@contextmanager
def names_as_they_are():
    """No `$` of a name begins a formula, and a letter that the font lacks is a box, without a warning."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def shown(text: str) -> str:
    """The text with control characters, and marks that turn its direction round, as escapes; line ends stay."""
    return "".join(
        letter
        if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Co", "Cn")
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def say(artist: Artist, *texts: str) -> None:
    """Name a mark, or each marker of a line, for a pointer that rests on it in a page."""
    artist.set_gid(SAID + json.dumps(texts))


def tidy(axis: Axes, grid: str = "both") -> None:
    """Leave out the upper and the right spine; put a light grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.92", linewidth=0.8)  # type: ignore[arg-type]
    axis.set_axisbelow(True)


def plain(value: float) -> str:
    """A number without exponent and without zeros at its end: 0.00003, 1000."""
    text = f"{value:.10f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def short(value: float) -> str:
    """A number with two digits that count, without exponent: 0.00012."""
    return plain(float(f"{value:.2g}"))


def percent(value: float) -> str:
    """A number of percent: 0.35%, 1000%."""
    return f"{plain(value)}%"


def ticks(low: float, high: float, least: int = 4) -> list[float]:
    """1, 10, 100, ... between two positive bounds; of at least `least`, those in between with 3, with 2 and 5, all of 1
    to 9, or equal steps."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        found = [value for value in found if low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9)]
        if len(found) >= least:
            return found
    return [value for value in MaxNLocator(5).tick_values(low, high) if low <= value <= high] if least > 1 else found


def log_scale(axis: Axes, low: float, high: float) -> None:
    """A vertical logarithmic axis between two bounds with plain ticks."""
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    _ticked(axis.yaxis, ticks(low, high), plain)


def symlog_scale(axis: Axes, low: float, high: float, linear: float) -> None:
    """A vertical axis of percents that is linear from -linear to linear, which is shaded and said, and logarithmic
    beyond; linear as a whole where nothing is far beyond."""
    if max(-low, high) <= 3 * linear:
        axis.set_ylim(low, high)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
        return
    axis.set_yscale("symlog", linthresh=linear, linscale=0.6)
    axis.set_ylim(low, high)
    below = [-value for value in ticks(linear, -low, 1)] if -low > linear else []
    _ticked(axis.yaxis, [*below[::-1], 0.0, *ticks(linear, high)], percent)
    axis.axhspan(-linear, linear, color="0.955", linewidth=0, zorder=0)
    axis.annotate(f"linear from -{percent(linear)} to {percent(linear)}", (1, max(low, -linear)),
                  xycoords=("axes fraction", "data"), xytext=(-3, 2), textcoords="offset points", ha="right",
                  va="bottom", fontsize=6.5, color="0.5", zorder=0.5)  # fmt: skip


def _ticked(line, places: list[float], words) -> None:
    line.set_major_locator(FixedLocator(places))
    line.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    line.set_minor_locator(NullLocator())
    line.set_minor_formatter(NullFormatter())


def caption(figure: FigureBase, text: str, inches: float | None = None) -> None:
    """Write below the picture what was measured, in lines as wide as it; `inches`: the width of a part of a picture."""
    if inches is None:
        assert isinstance(figure, Figure), "a part of a picture does not know its width"
        inches = figure.get_figwidth()
    width = int(inches * 72 / (0.57 * _WORDS))
    lines = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())
    figure.supxlabel(lines, x=0.01, ha="left", fontsize=_WORDS, color=INK)


def canvas(figure: Figure) -> FigureCanvasAgg:
    """Something to draw on, at the resolution in which the picture is written."""
    figure.set_dpi(DPI)
    return FigureCanvasAgg(figure)


def png(figure: Figure) -> bytes:
    """The picture; the same figure gives the same bytes."""
    canvas(figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    return stream.getvalue()


def picture(draw: Callable[P, Figure]) -> Callable[P, bytes]:
    """Let a function that draws a figure return its PNG; `__wrapped__` is the function that draws."""

    @wraps(draw)
    def drawn(*given: P.args, **named: P.kwargs) -> bytes:
        return png(draw(*given, **named))

    return drawn
