"""Draw what was measured of recipes: errors by layer, what they cost against bits, and the frontier.

Pictures are the bytes of a PNG; the same numbers give the same picture. Every family has its own look (`looks.py`),
every point its name beside it (`panels.py`), every picture a caption on what was measured.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvq_calib.report import looks as draw
from kvq_calib.report import panels
from kvq_calib.report.looks import Look, families, family, looks
from kvq_calib.report.panels import ATTENTION, KL, PERPLEXITY, TITLES, Panel, Point, not_drawn, points, recommended
from kvq_calib.report.panels import frontier as frontier_of
from kvq_calib.report.tables import by_bits, elsewhere, named, reference, where
from kvq_runtime.errors import counted
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS, SPOKEN, TextRecord, Windows, texts

Records = Sequence[TextRecord]
LINES = 7  # of a panel that are drawn in colour and named; of more records the others are thin and grey
SHORT = 24  # letters of a family's name in the key
NAMED = 16  # points of a panel; of more, those of the frontier and one of each family have their names
ERRORS = {
    "key_error": "keys",
    "value_error": "values",
    "attention_error": "attention output, in use: newest tokens exact",
    "attention_error_encoded": "attention output, every token but the sinks encoded",
}


@draw.picture
def error_by_layer(records: Records) -> Figure:
    """The error of keys and values over their variance, and of attention's output over its energy, in use and with all
    tokens encoded: a panel each, a line per recipe. Of more than can be told apart, those that `_lines` chooses are in
    colour: the others are grey lines without names."""
    records = _with_names(records)
    spoken = [id(one) for one in _lines(records)]
    chosen = iter(looks([one.result.recipe for one in records if id(one) in spoken]))
    styles = [{"label": one.name, **next(chosen).line} if id(one) in spoken else _GREY for one in records]
    figure = layer_errors([one.result.layers for one in records], styles)
    draw.key(figure, figure.axes)
    windows = records[0].protocol.error_windows
    draw.caption(
        figure,
        f"Squared error of keys and values over their variance, of attention's output over its energy, on {windows} of "
        f"the windows. {about(records, beside=False)} Attention that reads decoded tokens alone errs more than in use, "
        "where the newest tokens, which it reads most, are exact.",
    )
    return figure


def layer_errors(lines: Sequence[Sequence[Mapping[str, Any]]], styles: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each of ERRORS, a line for each list of layers; what is 0 or None leaves a gap."""
    figure = Figure(figsize=(10.5, 7.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (key, title) in zip(axes.flat, ERRORS.items(), strict=True):
        heights = []
        for rows, style in zip(lines, styles, strict=True):
            found = [row.get(key) or math.nan for row in rows]
            known = [(layer, value) for layer, value in enumerate(found) if value > 0]
            if known:
                (line,) = axis.plot([value if value > 0 else math.nan for value in found], **style)
                draw.say(line, *(f"layer {layer}, {title}: {value:.3g}" for layer, value in known))
                heights += [value for _, value in known]
        axis.set_title(title, loc="left", fontsize=10)
        if heights:
            draw.log_scale(axis, min(heights) / 1.3, max(heights) * 1.3)
        else:
            draw.nothing(axis, "not measured")
        draw.layers(axis)
        draw.tidy(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative squared error")
    for axis in axes[0]:
        axis.set_xlabel("")
    return figure


_GREY = {"label": "others", "color": "0.8", "linewidth": 0.8, "zorder": 1}


def _lines(records: Records) -> Records:
    """Up to LINES records: the first, which the picture is about, the recommended, the frontier from the fewest bits
    on, then the others in their order."""
    found = [point for name in PROTOCOLS for point in points(records, KL, name)]
    marked, known = recommended(found), {one.name: one for one in records}
    first = [known[one.name] for one in [*([marked] if marked else []), *frontier_of(found)]]
    return list({id(one): one for one in [records[0], *first, *records]}.values())[:LINES]


@draw.picture
def perplexity_by_bits(records: Records) -> Figure:
    """Draw KL divergence and perplexity of recipes over the bits they hold, a row a protocol. Lines to the right
    end at the bits of a cache of 4096 tokens, whiskers are a standard error over windows."""
    return costs(records, (KL, PERPLEXITY), 4096)


@draw.picture
def comparison(records: Records) -> Figure:
    """KL divergence, perplexity and, where it was measured, the error of attention's output against asymptotic bits: a
    row a protocol and a row a text of another kind, by full encode where it was measured."""
    by_layer = any(one.result.layers for one in records)
    return costs(records, (KL, PERPLEXITY, ATTENTION) if by_layer else (KL, PERPLEXITY))


def costs(records: Records, measures: Sequence[str], tokens: int | None = None) -> Figure:
    """A row of panels a protocol and a text, a column a measure; lines to the bits of a cache of so many tokens."""
    records = by_bits(_with_names(records))
    rows = [("", name, records) for name in _measured(records)]
    for text in texts(records):
        other = elsewhere(records, text)
        rows += [(text, name, other) for name in _measured(other)][:1]
    rows = rows or [("", IN_USE, records)]
    figure = Figure(figsize=(5.6 * len(measures) + 1.2, 0.9 + 4.3 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(measures), squeeze=False)
    drawn: list[Panel] = []
    for axes, (text, protocol, some) in zip(grid, rows, strict=True):
        for axis, measure in zip(axes, measures, strict=True):
            given = points(some, measure, protocol, f"at_{tokens}" if tokens else "")
            if text and measure == ATTENTION:
                axis.set_axis_off()  # measured on the first text alone
                continue
            title = f"{TITLES[measure]}\n{', '.join(filter(None, (text, SPOKEN[protocol])))}"
            drawn.append(panels.scatter(axis, given, measure, title, front=measure == KL))
    said = [f"Line to the right: bits of a cache of {tokens} tokens, exact ones included."] if tokens else []
    draw.caption(figure, " ".join([about(records, drawn), *said]))
    return _finish(figure, drawn, NAMED)


@draw.picture
def frontier(models: Sequence[Records], beside: bool = True, width: float = 9.0, height: float = 5.4) -> Figure:
    """KL divergence by bits by full encode: a row a model, a column a text.

    beside   also the texts of other kinds that records hold
    width    of the picture in inches
    height   of a model's row
    """
    figure = Figure(figsize=(width, height * len(models) + 0.5), layout="constrained")
    rows = []
    for records in models:
        records = by_bits(_with_names(records))
        rows.append({"": records} | ({text: elsewhere(records, text) for text in texts(records)} if beside else {}))
    grid = figure.add_gridspec(len(rows), math.lcm(*map(len, rows)))
    drawn: list[Panel] = []
    for number, groups in enumerate(rows):
        wide = grid.ncols // len(groups)
        found = {text: points(some, KL, FULL) for text, some in groups.items()}
        for place, (text, given) in enumerate(found.items()):
            axis = figure.add_subplot(grid[number, place * wide : (place + 1) * wide])
            axis.set_ylabel("" if place else TITLES[KL], fontsize=9)
            title = where(groups[""][0].protocol.model) + (f", {text or 'in domain'}" if len(groups) > 1 else "")
            every = [one for some in found.values() for one in some]
            drawn.append(panels.scatter(axis, given, KL, title, beside=every))
    draw.caption(
        figure, "\n".join(about(records, drawn if number == 0 else (), beside) for number, records in enumerate(models))
    )
    return _finish(figure, drawn, NAMED)


def scatter(given: Sequence[Point], front: bool = True, named: Sequence[Point] | None = None) -> Figure:
    """KL divergence by bits of any points, for a page.

    front   with the frontier and rings: points of one model and text
    named   those whose names are written. None: the ringed and the frontier, and others where there is room
    """
    figure = Figure(figsize=(10, 5), layout="constrained")
    panel = panels.scatter(figure.subplots(), given, KL, front=front)
    panel.axis.set_ylabel(TITLES[KL], fontsize=9)
    return _finish(figure, [panel], 0, named)


def _finish(figure: Figure, drawn: Sequence[Panel], most: int, named: Sequence[Point] | None = None) -> Figure:
    """Add the key of families, fix the layout, and write names where they are free, or of those alone in `named`."""
    shown = {family(one.recipe): look for panel in drawn for one, look in panel.looks.items()}
    many = any(len(panel.points) > most for panel in drawn)
    if many and len(shown) > 1:
        figure.legend(*_key(shown), loc="outside right upper", frameon=False, fontsize=8.5, title="family")
    draw.canvas(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for panel in drawn:
        some = panels.speakers(panel) if len(panel.points) > most else None
        panels.name(panel, some if named is None else named, others=named is None)
    return figure


def _key(shown: Mapping[str, Look]) -> tuple[list[Line2D], list[str]]:
    names = sorted(shown, key=lambda name: (name not in families(), name))[: len(families())]
    return [Line2D([], [], **shown[name].point) for name in names], [name[:SHORT] for name in names]


def _measured(records: Records) -> list[str]:
    """The protocols under which there are figures."""
    return [name for name in PROTOCOLS if any(one.figures(name) for one in records)]


def _with_names(records: Records) -> Records:
    return records if any(one.name != one.result.recipe for one in records) else named(records)


SENTENCES = {
    FULL: "Full encode: every token but the sinks is encoded before it is read.",
    IN_USE: "In use: tokens arrive in steps, the newest stay exact.",
}


def about(records: Records, drawn: Sequence[Panel] = (), beside: bool = True) -> str:
    """Describe what was measured, on texts of other kinds too if `beside`, and how to read the panels' marks."""
    given = records[0].protocol
    said = [f"{where(given.model)}, {_windows(given)}."]
    said += [f"{text}: {_windows(other)}." for text, other in given.texts.items()] if beside else []
    said += [SENTENCES[name] for name in _measured(records)]
    exact = [f"{one:.4g}" for name in PROTOCOLS if (one := reference(records, name))][:1]
    said += [f"Perplexity of the 16-bit model: {exact[0]}."] if exact else []
    return " ".join(said + (_marks(records, drawn) if drawn else []))


def _windows(given: Windows) -> str:
    return f"{counted(given.windows, 'held-out window')} of {counted(given.length, 'token')} of {given.text.source}"


def _marks(records: Records, drawn: Sequence[Panel]) -> list[str]:
    """Explain the marks of the panels."""
    every = [one for panel in drawn for one in panel.points]
    exact = dict.fromkeys(name for panel in drawn for name in panel.left_out)
    figures = [(one.name, one.figures(name)) for one in records for name in PROTOCOLS]
    unknown = not_drawn(name for name, found in figures if found is not None and found.kl is None)
    said = {
        "Grey stairs: the frontier; no recipe has both fewer bits and less divergence.": any(
            one.front for one in drawn
        ),
        "Whiskers: a standard error over windows.": any(one.spread is not None for one in every),
        "Ringed: recommended.": any(recommended(one.points) for one in drawn),
        "No other recipe was measured beside it; kvq-calibrate --baseline NAME and kvq eval do that.": all(
            len(one.points) < 2 for one in drawn
        ),
        f"Not drawn, for it is exact: {', '.join(exact)}.": exact,
        unknown: unknown,
    }
    return [text for text, holds in said.items() if holds]
