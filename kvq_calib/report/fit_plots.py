"""Draw what a fit found: bits that a budget gave to layers, what keys and values can be predicted from, and how well a
subspace holds queries.

Pictures are the bytes of a PNG; the same numbers give the same picture.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from kvq_calib.report import looks as draw
from kvq_calib.report.looks import COLOURS

MARKS = ("o", "s", "^", "D", "v", "P", "X")


@draw.picture
def bits_by_layer(name: str, rows: Sequence[Mapping[str, Any]], where: str) -> Figure:
    """Bits of each layer's keys and values as bars, from rows with "layer", "keys" and "values".

    where   the model, its size, and what the bits were chosen on
    """
    figure = layer_bits(rows, max(7.0, 2 + 0.28 * len(rows)), 3.8)
    mean = sum(row["keys"] + row["values"] for row in rows) / (2 * len(rows))
    figure.axes[0].set_title(f"{name}: {mean:.3g} bits in all", loc="left", fontsize=10)
    draw.caption(
        figure,
        f"{where}. Bits per element that the search gave to each layer, scales and metadata included, for the least "
        "sum of the errors that it measured there within the budget.",
    )
    return figure


def layer_bits(rows: Sequence[Mapping[str, Any]], wide: float, high: float) -> Figure:
    """Bars alone, of such a size in inches."""
    figure = Figure(figsize=(wide, high), layout="constrained")
    axis = figure.subplots()
    for place, role in enumerate(("keys", "values")):
        bars = axis.bar([row["layer"] + 0.4 * (place - 0.5) for row in rows], [row[role] for row in rows], 0.38,
                        label=role, color=COLOURS[place])  # fmt: skip
        for bar, row in zip(bars, rows, strict=True):
            draw.say(bar, f"layer {row['layer']}, {role}: {row[role]:.4g}")
    draw.layers(axis)
    axis.set_ylabel("bits per element")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    draw.tidy(axis, "y")
    return figure


@draw.picture
def query_deviation(layers: Sequence[Mapping[str, Any]], where: str) -> Figure:
    """Draw how far held-out queries leave their calibrated subspace: by its rank (the paper's figure 2), for some
    layers, and by layer, for some ranks.

    layers   of an artifact's fit
    where    the model, its size, and the held-out sequences
    """
    curves = {n: row["key"]["query_deviation"] for n, row in enumerate(layers) if "query_deviation" in row["key"]}
    size = len(next(iter(curves.values())))
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    steps = max(1, min(5, len(curves) - 1))
    for number, place in enumerate(sorted({round(step * (len(curves) - 1) / steps) for step in range(steps + 1)})):
        layer = list(curves)[place]
        left.plot(range(size + 1), [1.0, *curves[layer]], label=f"layer {layer}", color=COLOURS[number], linewidth=1.6)
    for number, rank in enumerate(sorted({max(1, size * share // 16) for share in (1, 2, 4, 8)})):
        points = [(layer, curve[rank - 1]) for layer, curve in curves.items()]
        right.plot(*zip(*points, strict=True), label=f"rank {rank}", **_look(number))
    left.set_xlabel(f"rank of the subspace, of {size}")
    left.set_ylabel("deviation, over the query's length")
    draw.layers(right)
    for axis in (left, right):
        axis.set_ylim(0, 1.03)
        draw.key_of(axis)
        draw.tidy(axis)
    draw.caption(
        figure,
        f"{where}. Length of what a query has outside its layer's subspace of this rank, over the query's length: root "
        "mean square over heads and queries.",
    )
    return figure


def _look(number: int) -> dict[str, Any]:
    """Return the look of a line that is no recipe; a picture has at most as many as there are colours."""
    return {"color": COLOURS[number], "marker": MARKS[number], "linewidth": 1.6, "markersize": 4.5}
