"""Draw what a benchmark measured: tokens per second, and the bytes that a cache holds, against context.

The bytes of a PNG; the same figures give the same picture. A row of panels a batch, a line a cache: recipes have the
looks of their families, transformers' own caches are black and grey.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvq_calib.report import frame
from kvq_calib.report.looks import BLACK, GREY, Look, looks

Rows = Sequence[Mapping[str, Any]]
STOCK = (("x", BLACK), ("1", GREY), ("2", GREY), ("3", GREY), ("4", GREY), ("+", GREY))  # markers of no family
MIB = 1 << 20
TITLES = {
    "tokens_per_s": "tokens per second",
    "mib": "MiB that the cache holds",
    "first_token_s": "seconds to the first token",
}


@frame.picture
def figures(found: Rows, notes: Sequence[str]) -> Figure:
    """Speed, bytes and time to the first token by context.

    found   as `bench.figures.figures` gives them; those without figures are left out
    notes   what stands below
    """
    found = [{**one, "mib": one["cache_bytes"] / MIB} for one in found if one["measured"]]
    batches = list(dict.fromkeys(one["batch"] for one in found)) or [0]
    figure = Figure(figsize=(13.5, 1.3 + 3.7 * len(batches)), layout="constrained")
    grid = figure.subplots(len(batches), len(TITLES), squeeze=False)
    chosen = _looks(found)
    for axes, batch in zip(grid, batches, strict=True):
        some = [one for one in found if one["batch"] == batch]
        for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
            _lines(axis, some, name, chosen)
            axis.set_title(f"{title}, batch {batch}", loc="left", fontsize=10)
    shown = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False, fontsize=8.5)
    frame.caption(figure, "\n".join(notes))
    return figure


def _looks(found: Rows) -> dict[str, Look]:
    """The look of each cache, by name."""
    recipes = {one["cache"]: one["recipe"] for one in found}
    ours = [name for name, recipe in recipes.items() if recipe]
    stock = [name for name, recipe in recipes.items() if not recipe]
    chosen = dict(zip(ours, looks([recipes[name] for name in ours]), strict=True))
    for number, name in enumerate(stock):
        marker, colour = STOCK[number % len(STOCK)]
        chosen[name] = Look(colour, marker, number)
    return {name: chosen[name] for name in recipes}


def _lines(axis: Axes, some: Rows, name: str, chosen: Mapping[str, Look]) -> None:
    for cache, look in chosen.items():
        points = [(one["context"], one[name]) for one in some if one["cache"] == cache]
        if points:
            axis.plot(*zip(*points, strict=True), label=cache, **look.line)
    contexts = sorted({one["context"] for one in some})
    heights = [one[name] for one in some]
    if not heights:
        axis.annotate("nothing was measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")
        return
    axis.set_xscale("log")
    axis.set_xlim(contexts[0] / 1.15, contexts[-1] * 1.15)
    axis.xaxis.set_major_locator(FixedLocator(contexts))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    frame.log_scale(axis, min(heights) / 1.4, max(heights) * 1.4)
    axis.set_xlabel("context, tokens", fontsize=9)
    frame.tidy(axis)
