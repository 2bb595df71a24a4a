"""Give pictures their look: a colour and a marker a family of recipes, axes without ornament, plain numbers, a caption.

A family is a file of kvq_runtime/recipes, which names its look, `auto`, or the name of somebody's own recipe. No two
families share both colour and marker; families that share a colour have markers of different kinds (round, pointed,
crossed). Each line of a picture has a look of its own.
"""

import io
import json
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ParamSpec

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from kvq_runtime import recipe

# Okabe and Ito, 2008: told apart with any kind of colour vision; shapes tell them apart without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
WINE, OLIVE, INDIGO, GREY = "#882255", "#8A8A1F", "#5B3FA0", "#808080"
NAMED = {"blue": BLUE, "red": RED, "green": GREEN, "pink": PINK, "orange": ORANGE, "sky": SKY, "black": BLACK,
         "wine": WINE, "olive": OLIVE, "indigo": INDIGO, "grey": GREY}  # fmt: skip
AUTO = (BLACK, "P")
OWN = ((BLACK, "o"), (BLACK, "s"), (BLACK, "^"), (SKY, "D"), (SKY, "P"), (ORANGE, "o"))  # families of others
DPI = 130
INK = "0.35"
SAID = "said:"  # before what is said of a mark, in its identifier
_WORDS = 8.5  # points of a caption's letters
P = ParamSpec("P")
_STROKES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_FILLS = ("full", "none", "left", "bottom")


family = cache(recipe.family)  # it reads all recipes


@cache
def families() -> dict[str, tuple[str, str]]:
    """Colour and marker of every family that comes with kvq."""
    found = {name.replace("_", "-"): (NAMED[one.look[0]], one.look[1]) for name, one in recipe.facts().items()}
    return found | {"auto": AUTO}


@dataclass(frozen=True)
class Look:
    """Colour, marker, and which of those with this colour and marker it is, from 0."""

    colour: str
    marker: str
    variant: int = 0

    @property
    def point(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a marker; variants look alike, for their names stand beside them."""
        return {"color": self.colour, "marker": self.marker, "markersize": 12 if self.marker == "*" else 7,
                "markeredgecolor": "white", "markeredgewidth": 0.6, "linestyle": "none"}  # fmt: skip

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a line with markers: stroke and filling tell variants apart."""
        stroke = _STROKES[self.variant % len(_STROKES)]
        fill = _FILLS[(self.variant + self.variant // 12) % len(_FILLS)]  # 6 strokes and 4 fillings: 24 differ
        return {"color": self.colour, "marker": self.marker, "markersize": 8 if self.marker == "*" else 5.5,
                "linewidth": 1.5, "linestyle": stroke, "fillstyle": fill}  # fmt: skip

    @property
    def ink(self) -> str:
        """The colour of its name: darkened, so that it can be read on white."""
        red, green, blue = to_rgb(self.colour)
        return to_hex((0.62 * red, 0.62 * green, 0.62 * blue))


def looks(recipes: Sequence[str]) -> list[Look]:
    """The looks of the recipes of one picture, by name: a family's recipes are its variants, in their order."""
    seen: Counter[tuple[str, str]] = Counter()
    own = [name for name in dict.fromkeys(map(family, recipes)) if name not in families()]
    found = []
    for name in map(family, recipes):
        colour, marker = families()[name] if name in families() else OWN[own.index(name) % len(OWN)]
        found.append(Look(colour, marker, seen[colour, marker]))
        seen[colour, marker] += 1
    return found


@contextmanager
def names_as_they_are() -> Iterator[None]:
    """No `$` of a name begins a formula, and a letter that the font lacks is a box, without a warning."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def say(artist: Artist, *texts: str) -> None:
    """Name a mark, or each marker of a line, for a pointer that rests on it in a page."""
    artist.set_gid(SAID + json.dumps(texts))


def tidy(axis: Axes, grid: str = "both") -> None:
    """Leave out the upper and the right spine; put a light grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.92", linewidth=0.8)  # type: ignore[arg-type]
    axis.set_axisbelow(True)


def layers(axis: Axes) -> None:
    """Layers across: whole numbers."""
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def nothing(axis: Axes, said: str) -> None:
    """Say in the middle of empty axes why they are."""
    axis.annotate(said, (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")


def key(figure: Figure, axes: Iterable[Axes]) -> None:
    """Write beside the picture what its lines are, each name once."""
    shown = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False, fontsize=8.5)


def key_of(axis: Axes, title: str | None = None) -> None:
    """Write beside the axes what their lines are."""
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), title=title)


def plain(value: float) -> str:
    """A number without exponent and without zeros at its end: 0.00003, 1000."""
    text = f"{value:.10f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def short(value: float) -> str:
    """A number with two digits that count, without exponent: 0.00012."""
    return plain(float(f"{value:.2g}"))


def _percent(value: float) -> str:
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
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
        return
    axis.set_yscale("symlog", linthresh=linear, linscale=0.6)
    axis.set_ylim(low, high)
    below = [-value for value in ticks(linear, -low, 1)] if -low > linear else []
    _ticked(axis.yaxis, [*below[::-1], 0.0, *ticks(linear, high)], _percent)
    axis.axhspan(-linear, linear, color="0.955", linewidth=0, zorder=0)
    axis.annotate(f"linear from -{_percent(linear)} to {_percent(linear)}", (1, max(low, -linear)),
                  xycoords=("axes fraction", "data"), xytext=(-3, 2), textcoords="offset points", ha="right",
                  va="bottom", fontsize=6.5, color="0.5", zorder=0.5)  # fmt: skip


def _ticked(line: Axis, places: Sequence[float], words: Callable[[float], str]) -> None:
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
        with names_as_they_are():
            return png(draw(*given, **named))

    return drawn
