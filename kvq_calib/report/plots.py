"""Draw the cost of recipes against bits. The same numbers give the same bytes."""

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from kvq_calib.report.tables import about_text, size_of, standard_errors
from kvq_runtime.cli.table import printable
from kvq_runtime.registry.evaluation_records import FULL, PROTOCOLS, SPOKEN, TextRecord

Records = Sequence[TextRecord]
MARKERS = "os^Dv<>pPX*"
EXACT = 16.0  # bits of a cache that is not quantized
LONGEST = 48  # letters of a name in a picture


def cost_by_bits(records: Records) -> Figure:
    """Draw KL divergence and perplexity against bits, with standard errors: a row of panels for each protocol."""
    protocols = [name for name in PROTOCOLS if any(one.figures(name) for one in records)] or [FULL]
    figure = Figure(figsize=(11.2, 0.9 + 4 * len(protocols)), layout="constrained")
    for (left, right), protocol in zip(figure.subplots(len(protocols), 2, squeeze=False), protocols, strict=True):
        left.set_title(f"KL divergence from 16 bit, nats per token: {SPOKEN[protocol]}", loc="left", fontsize=9)
        right.set_title(f"perplexity above 16 bit, %: {SPOKEN[protocol]}", loc="left", fontsize=9)
        points = [(one, part) for one in records if (part := one.figures(protocol)) is not None]
        _scatter(left, [(one, part.kl, standard_errors(part)[1]) for one, part in points], log=True)
        _scatter(right, [(one, part.relative, standard_errors(part)[0]) for one, part in points], log=False)
    _caption(figure, "Bars: a standard error over windows.", records)
    return figure


def _scatter(axis: Axes, points: Sequence[tuple[TextRecord, float | None, float | None]], log: bool) -> None:
    """Draw a marker with its name for each (record, cost, standard error) that is not exact; without `log` in %."""
    unit, drawn = 1 if log else 100, 0
    for number, (record, cost, error) in enumerate(points):
        bits = record.result.bits["asymptotic"]
        if cost is None or bits >= EXACT or (log and cost <= 1e-9):
            continue
        bars = None if error is None else [[unit * (min(error, 0.9 * cost) if log else error)], [unit * error]]
        axis.errorbar(bits, unit * cost, bars, capsize=2, **_style(number))
        axis.annotate(_short(record.name), (bits, unit * cost), (4, 4), textcoords="offset points", fontsize=8)
        drawn += 1
    axis.margins(0.15)
    if log and drawn:
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif not log:
        axis.axhline(0, color="0.35", linewidth=1, linestyle="--")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_xlabel("bits per key or value element, asymptotic", fontsize=9)
    _tidy(axis)


def _short(name: str) -> str:
    return _plain(name[:LONGEST])


def _plain(text: str) -> str:
    """Escape what matplotlib would read as a formula, and unprintable characters."""
    return printable(text).replace("$", r"\$")


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)]}


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)


def _caption(figure: Figure, text: str, records: Records) -> None:
    given = records[0].protocol
    text = f"{text} {given.model.id} ({size_of(given.model.parameters)} parameters), {about_text(given)}"
    width = int(figure.get_figwidth() * 15)
    figure.supxlabel(textwrap.fill(_plain(text), width), x=0.01, ha="left", fontsize=8.5, color="0.35")


def png(figure: Figure) -> bytes:
    """Return the picture as a PNG."""
    return _saved(figure, format="png", dpi=130, metadata={"Software": None})


def svg(figure: Figure) -> bytes:
    """Return the picture as an SVG."""
    return _saved(figure, format="svg", metadata={"Date": None, "Creator": None})


def _saved(figure: Figure, **settings: Any) -> bytes:
    """Draw letters that the font lacks as boxes without a warning, and the same bytes for the same figure."""
    stream = io.BytesIO()
    with rc_context({"svg.hashsalt": "kvq"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(stream, **settings)
    return stream.getvalue()
