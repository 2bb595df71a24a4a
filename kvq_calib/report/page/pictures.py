"""Draw the pictures of pages, as SVG: by layer, by bits, by task."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from kvq_calib.report.fit_plots import layer_bits
from kvq_calib.report.frame import names_as_they_are
from kvq_calib.report.looks import BLUE, Look
from kvq_calib.report.plots import SHORT, layer_errors, scatter
from kvq_calib.report.points import Point
from kvq_calib.report.svg import svg
from kvq_calib.report.task_plot import grid
from kvq_runtime.registry.measured import SPOKEN, Cell

Rows = Sequence[Mapping[str, Any]]
MOST_CELLS = 32  # lengths, depths and tasks that a picture has; what has more is a table alone


def _drawn(draw: Callable[..., Figure]) -> Callable[..., Markup]:
    """Draw a picture from what JSON can hold; a screen reader reads the function's docstring."""
    label = str(draw.__doc__).rstrip(".")

    @lru_cache(maxsize=64)  # a page of every version of a registry has many pictures twice
    def draw_once(given: str) -> Markup:
        with names_as_they_are():
            return Markup(f"<figure>{svg(draw(*json.loads(given)), label)}</figure>")

    return lambda *given: draw_once(json.dumps(given, default=asdict))


@_drawn
def bits(rows: Rows) -> Figure:
    """Bits per element by layer."""
    return layer_bits(rows, 10, 2.8)


@_drawn
def errors(rows: Rows) -> Figure:
    """Relative squared error by layer."""
    return layer_errors([rows], [Look(BLUE, "o").line])


@_drawn
def frontier(points: Rows) -> Figure:
    """KL divergence against bits per element."""
    return scatter(_short(points))


@_drawn
def outliers(points: Rows, worst: int) -> Figure:
    """KL divergence against bits per element."""
    found = _short(points)
    apart = {(one.bits, one.cost): one for one in reversed(found)}  # of points in one place the first
    return scatter(found, front=False, named=sorted(apart.values(), key=lambda one: -one.cost)[:worst])


def _short(points: Rows) -> list[Point]:
    return [Point(**{**one, "name": one["name"][:48]}) for one in points]


@_drawn
def _grid(rows: Sequence[tuple[str, Rows]], *given: Any) -> Figure:
    """Right answers by task, length and depth."""
    figure = grid([(protocol, [Cell(**cell) for cell in cells]) for protocol, cells in rows], *given)
    figure.set_figwidth(max(figure.get_figwidth(), 10))  # as wide as the others, so that letters are as large
    return figure


def answers(tasks: Rows) -> Markup | None:
    """Accuracy by length and depth, a row of panels a protocol; None where it was not counted so."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in tasks:
        protocol = str(SPOKEN.get(one["protocol"], one["protocol"]))
        found.setdefault(protocol, []).extend(cell | {"task": one["task"][:SHORT]} for cell in one["cells"])
    rows = [(protocol, cells) for protocol, cells in found.items() if cells]
    cells = [cell for _, some in rows for cell in some]
    names, lengths, depths = ({cell[name] for cell in cells} for name in ("task", "length", "depth"))
    if not cells or max(map(len, (names, lengths, depths))) > MOST_CELLS:
        return None
    return _grid(rows, sorted(names), sorted(lengths), sorted(depths))
