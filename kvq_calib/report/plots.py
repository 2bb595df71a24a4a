"""Draw measurements: errors and bits by layer, divergence and perplexity against bits.

The same numbers give the same picture: a PNG beside a card, an SVG in a page.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from kvq_calib.report.tables import (
    attention_error,
    by_bits,
    elsewhere,
    kl_error,
    named,
    reference,
    standard_error,
    where,
)
from kvq_runtime.cli.table import printable
from kvq_runtime.errors import counted
from kvq_runtime.registry.evaluation_records import IN_USE, PROTOCOLS, SPOKEN, TextRecord, other_texts

Records = Sequence[TextRecord]
KL, PERPLEXITY, ATTENTION = "kl", "relative", "attention"
TITLES = {
    KL: "KL divergence from the 16-bit model, nats per token",
    PERPLEXITY: "perplexity above that of the 16-bit model, %",
    ATTENTION: "attention output, relative squared error",
}
ERRORS = {
    "key_error": "keys",
    "value_error": "values",
    "attention_error": "attention output, in use",
    "attention_error_encoded": "attention output, every token but the sinks encoded",
}
MARKERS = "os^Dv<>pPX*"
EXACT = 16.0  # bits of a cache that is not quantized
LONGEST = 48  # letters of a name in a picture


@dataclass(frozen=True)
class Point:
    """A recipe's cost at its bits; `spread` is the standard error over windows, None if it is not known."""

    name: str
    bits: float
    cost: float
    spread: float | None = None


def error_by_layer(records: Records) -> bytes:
    """Draw a line a recipe: errors of keys and values over their variance, of attention's output over its energy."""
    records = _with_names(records)
    with _plain_text():
        figure = layer_errors({one.name: one.result.layers for one in records})
        windows = counted(records[0].protocol.error_windows or 0, "window")
        _caption(figure, f"Relative squared errors on {windows}. {about(records)}")
        return png(figure)


def layer_errors(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw a panel for each of ERRORS, and a line for each name; an error that is 0 or unknown leaves a gap."""
    figure = Figure(figsize=(10.5, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (key, title) in zip(axes.flat, ERRORS.items(), strict=True):
        for number, (name, rows) in enumerate(lines.items()):
            heights = [value if (value := row.get(key) or 0.0) > 0 else math.nan for row in rows]
            axis.plot(heights, label=_short(name), color=f"C{number % 10}", marker=MARKERS[number % len(MARKERS)])
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_yscale("log")
        _tidy(axis)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[1]:
        axis.set_xlabel("layer")
    if len(lines) > 1:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def perplexity_by_bits(records: Records) -> bytes:
    """Draw divergence, perplexity and, if errors by layer were measured, attention's error against bits: a row a
    protocol, then a row a text of another kind."""
    records = by_bits(_with_names(records))
    measures = (KL, PERPLEXITY, ATTENTION) if any(one.result.layers for one in records) else (KL, PERPLEXITY)
    rows = [("", name, records) for name in _measured(records)]
    for text in other_texts(records):
        other = elsewhere(records, text)
        rows += [(text, name, other) for name in _measured(other)][:1]
    rows = rows or [("", IN_USE, records)]
    with _plain_text():
        figure = Figure(figsize=(5.6 * len(measures), 0.9 + 4 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(measures), squeeze=False)
        for axes, (text, protocol, some) in zip(grid, rows, strict=True):
            for axis, measure in zip(axes, measures, strict=True):
                _scatter(axis, points(some, measure, protocol), measure)
                told = ", ".join(filter(None, (_short(text), SPOKEN[protocol])))
                axis.set_title(f"{TITLES[measure]}\n{told}", loc="left", fontsize=9)
        _caption(figure, f"{about(records)} Bars: a standard error over windows.")
        return png(figure)


def divergence_by_bits(given: Sequence[Point]) -> Figure:
    """Draw the divergence of any points against their bits."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axis = figure.subplots()
    _scatter(axis, given, KL)
    axis.set_ylabel(TITLES[KL], fontsize=9)
    return figure


def bits_by_layer(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the bits of each layer's keys and values as bars, from rows with "layer", "keys" and "values"."""
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axis = figure.subplots()
    for place, role in enumerate(("keys", "values")):
        axis.bar([row["layer"] + 0.4 * (place - 0.5) for row in rows], [row[role] for row in rows], 0.38, label=role)
    axis.set(xlabel="layer", ylabel="bits per element")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    _tidy(axis)
    return figure


def points(records: Records, measure: str, protocol: str) -> list[Point]:
    """Return the points of one panel; records without figures are left out."""
    found = []
    for record in records:
        part = record.figures(protocol)
        if part is None:
            continue
        spread, cost = None, attention_error(record, protocol) if measure == ATTENTION else part.kl
        if measure == KL:
            spread = kl_error(part)
        elif measure == PERPLEXITY:
            error = standard_error(part)
            cost, spread = 100 * part.relative, None if error is None else 100 * error
        if cost is not None:
            found.append(Point(record.name, record.result.bits["asymptotic"], cost, spread))
    return found


def _scatter(axis: Axes, given: Sequence[Point], measure: str) -> None:
    """Draw a marker with its name for each point that is not exact."""
    log = measure != PERPLEXITY
    drawn = [one for one in given if one.bits < EXACT and (not log or one.cost > 1e-9)]
    for number, one in enumerate(drawn):
        error = None if one.spread is None else [[min(one.spread, 0.9 * one.cost) if log else one.spread], [one.spread]]
        marker, colour = MARKERS[number % len(MARKERS)], f"C{number % 10}"
        axis.errorbar(one.bits, one.cost, error, color=colour, marker=marker, capsize=2, linewidth=0.9)
        axis.annotate(_short(one.name), (one.bits, one.cost), (4, 4), textcoords="offset points", fontsize=8)
    axis.margins(0.15)
    if log and drawn:
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif not log:
        axis.axhline(0, color="0.35", linewidth=1, linestyle="--")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_xlabel("bits per key or value element, asymptotic", fontsize=9)
    _tidy(axis)


def about(records: Records) -> str:
    """Describe what was measured: model, windows, the 16-bit model's perplexity."""
    given = records[0].protocol
    windows = counted(given.windows, "held-out window")
    said = f"{where(given.model)}, {windows} of {counted(given.length, 'token')} of {given.text.source}."
    exact = next((found for name in PROTOCOLS if (found := reference(records, name))), None)
    return said if exact is None else f"{said} Perplexity of the 16-bit model: {exact:.4g}."


def _measured(records: Records) -> list[str]:
    return [name for name in PROTOCOLS if any(one.figures(name) for one in records)]


def _with_names(records: Records) -> Records:
    return records if any(one.name != one.result.recipe for one in records) else named(records)


def _short(name: str) -> str:
    return printable(name)[:LONGEST]


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)


def _caption(figure: Figure, text: str) -> None:
    width = int(figure.get_figwidth() * 15)
    figure.supxlabel(textwrap.fill(printable(text), width), x=0.01, ha="left", fontsize=8.5, color="0.35")


@contextmanager
def _plain_text() -> Iterator[None]:
    """Parse no formula in a name, and draw letters that the font lacks as boxes without a warning."""
    with rc_context({"text.parse_math": False, "svg.hashsalt": "kvq"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def png(figure: Figure) -> bytes:
    """Return the picture as a PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, metadata={"Software": None})
    return stream.getvalue()


def svg(figure: Figure) -> bytes:
    """Return the picture as an SVG."""
    stream = io.BytesIO()
    with _plain_text():
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
