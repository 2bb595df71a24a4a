"""Draw what was measured: error by layer, perplexity against bits, what keys and values can be predicted from, and how
well a subspace holds queries.

Each function returns the bytes of a PNG; the same numbers give the same picture.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from kvq_calib.evaluate.probe import means
from kvq_calib.report.tables import attention_error, reference
from kvq_runtime.recipe import family
from kvq_runtime.registry.measured import IN_USE, PROTOCOLS, SPOKEN, decisive, figures

# Okabe and Ito, 2008: told apart with any kind of colour vision; shapes tell them apart without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {"linewidth": 1.6, "markersize": 4.5}
TOLD_APART = 20  # lines of a comparison


def error_by_layer(records: Sequence[Mapping[str, Any]]) -> bytes:
    """The error of keys and values over their variance, and of attention's output over its energy: a panel each, a line
    per recipe."""
    panels = {
        "key_error": "Keys",
        "value_error": "Values",
        "attention_error_encoded": "Attention output, all encoded",
    }
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for number, record in enumerate(records):
            points = [(row["layer"], row[name]) for row in record["result"]["layers"] if row[name]]
            if points:
                axis.plot(*zip(*points, strict=True), label=record["result"]["recipe"], **_look(number))
        axis.set_title(title)
        axis.set_xlabel("layer")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _tidy(axis)
    axes[0].set_ylabel("relative squared error")
    _legend(figure, axes, records)
    figure.suptitle(_where(records), fontsize=9, color="0.35")
    return _png(figure)


def perplexity_by_bits(records: Sequence[Mapping[str, Any]], tokens: int = 4096) -> bytes:
    """How much perplexity a recipe costs, against the bits it holds, a panel a protocol; whiskers are a standard error
    over windows."""
    names = [name for name in PROTOCOLS if any(figures(record, name) for record in records)]
    figure = Figure(figsize=(7.2 if len(names) < 2 else 11.5, 4.4), layout="constrained")
    panels = figure.subplots(1, max(1, len(names)), squeeze=False)[0]
    for axis, name in zip(panels, names, strict=False):
        _costs(axis, [(number, record) for number, record in enumerate(records) if figures(record, name)], name, tokens)
    panels[0].set_ylabel("perplexity against 16 bit" if names else "nothing was measured")
    exact = ", ".join(f"{one:.4g}" for name in names[:1] if (one := reference(records, name)))
    figure.suptitle(f"{_where(records)}; 16 bit: {exact or 'not measured'}", fontsize=9, color="0.35")
    return _png(figure)


def _costs(axis: Axes, numbered: Sequence[tuple[int, Mapping[str, Any]]], name: str, tokens: int) -> None:
    """One panel: what each record measured under one protocol."""
    axis.axhline(0, color="0.35", linewidth=1, linestyle="--")
    axis.annotate("16 bit", (1, 0), xycoords=("axes fraction", "data"), xytext=(-4, -4), textcoords="offset points",
                  ha="right", va="top", fontsize=9, color="0.35")  # fmt: skip
    for number, record in numbered:
        found, bits, look = figures(record, name), record["result"]["bits"], _look(number)
        assert found is not None, "records without figures are left out"
        cost = 100 * found["relative"]
        axis.plot([bits["asymptotic"], bits[f"at_{tokens}"]], [cost, cost], color=look["color"], linewidth=1, alpha=0.5)
        axis.errorbar(bits["asymptotic"], cost, 100 * (found["relative_se"] or 0), capsize=3,
                      label=record["result"]["recipe"], **look)  # fmt: skip
        axis.plot(bits[f"at_{tokens}"], cost, look["marker"], color=look["color"], markerfacecolor="white")
    axis.set_title(SPOKEN[name], loc="left", fontsize=10)
    axis.set_xlabel(f"bits per element: filled, asymptotic; open, a cache of {tokens} tokens")
    axis.yaxis.set_major_formatter(PercentFormatter(decimals=None))
    axis.margins(x=0.08, y=0.12)
    _tidy(axis)
    axis.legend(frameon=False, fontsize=9)


def bits_by_layer(name: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Bits of each layer's keys and values as bars, from rows with "layer", "keys" and "values"."""
    figure = Figure(figsize=(max(6.0, 2 + 0.28 * len(rows)), 3.4), layout="constrained")
    axis = figure.subplots()
    for place, role in enumerate(("keys", "values")):
        axis.bar([row["layer"] + 0.4 * (place - 0.5) for row in rows], [row[role] for row in rows], 0.38, label=role,
                 color=COLOURS[place])  # fmt: skip
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("bits per element")
    axis.legend(frameon=False, ncols=2, fontsize=9)
    mean = sum(row["keys"] + row["values"] for row in rows) / (2 * len(rows))
    axis.set_title(f"{name}: {mean:.3g} bits in all", fontsize=9, color="0.35")
    _tidy(axis, "y")
    return _png(figure)


def comparison(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Perplexity, divergence and the error of attention's output against asymptotic bits: a row a protocol, a line per
    recipe over its bits. Of many lines, those of a family look alike."""
    names = [name for name in PROTOCOLS if any(figures(record, name) for record in records)] or [IN_USE]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for record in by_bits(records):
        lines.setdefault(series(record["result"]["recipe"]), []).append(record)
    labels = _labels(lines)
    numbers = {label: number for number, label in enumerate(sorted(set(labels.values())))}
    figure = Figure(figsize=(13, 0.4 + 4.8 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 3, squeeze=False)
    for name, axes in zip(names, panels, strict=True):
        measures = {
            f"perplexity against 16 bit, %, {SPOKEN[name]}": lambda one, p=name: _of(one, p, "relative", 100),
            "KL divergence, nats": lambda one, p=name: _of(one, p, "kl"),
            "attention output, relative squared error": lambda one, p=name: attention_error(one, p),
        }
        for axis, (title, value) in zip(axes, measures.items(), strict=True):
            for line, group in sorted(lines.items(), key=lambda line: labels[line[0]]):
                points = [(bits_of(one), cost) for one in group if (cost := value(one)) is not None]
                number = numbers[labels[line]]
                look = _look(number) | {"marker": MARKS[(number + number // len(COLOURS)) % len(MARKS)], "linewidth": 1}
                axis.plot([x for x, _ in points], [y for _, y in points], label=labels[line], alpha=0.85, **look)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("bits per key or value element, asymptotic")
            if axis is axes[0]:
                axis.set_yscale("symlog", linthresh=0.1)  # a cost within the noise may be below zero
            elif any((value(one) or 0) > 0 for one in records):
                axis.set_yscale("log")
            _tidy(axis)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    handles, shown = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(shown, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(_where(records), fontsize=9, color="0.35")
    return _png(figure)


def bits_of(record: Mapping[str, Any]) -> float:
    """Asymptotic bits per element."""
    return record["result"]["bits"]["asymptotic"]


def _of(record: Mapping[str, Any], protocol: str, name: str, times: float = 1.0) -> float | None:
    """One figure of a protocol, if there is one."""
    found = figures(record, protocol)
    return None if found is None else times * found[name]


def _labels(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """What each line is called: its own name or, of many, its family's."""
    if len(lines) <= TOLD_APART:
        return {name: name for name in lines}
    return {name: family(group[0]["result"]["recipe"]) for name, group in lines.items()}


def by_bits(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records in the order of their asymptotic bits, then of their divergence; those without one last."""

    def order(one: Mapping[str, Any]) -> tuple[float, float]:
        name = decisive(one)
        return bits_of(one), math.inf if name is None else _of(one, name, "kl") or 0.0

    return sorted(records, key=order)


def series(name: str) -> str:
    """A recipe's name without its bits: what is one line of a plot."""
    return re.sub(r"-?\d+(\.\d+)?bit", "", name)


def probes(found: Mapping[str, Any]) -> bytes:
    """Explained variance: means over layers as bars (the paper's figure 2), chosen sources by layer (figure 5)."""
    rows = means(found)
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    roles: Any = figure.subfigures(2, 1)
    top, bottom = roles
    axis = top.subplots()
    for place, (role, label) in enumerate((("keys", "keys"), ("values", "values"))):
        heights = [row[role] or 0.0 for row in rows]
        bars = axis.bar([x + 0.38 * (place - 0.5) for x in range(len(rows))], heights, 0.36, label=label,
                        color=COLOURS[place])  # fmt: skip
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=7.5, padding=1)
    axis.set_xticks(range(len(rows)), [row["source"] for row in rows])
    axis.set_ylabel("explained variance")
    axis.set_ylim(min(0.0, *(row[role] or 0.0 for row in rows for role in ("keys", "values"))), 1.09)
    axis.set_title("Mean over layers", loc="left", fontsize=10)
    axis.legend(frameon=False, ncols=2, loc="upper right", fontsize=9)
    _tidy(axis, "y")
    panels = bottom.subplots(1, 2, sharey=True)
    for panel, (role, title) in zip(panels, (("key", "Keys by layer"), ("value", "Values by layer")), strict=True):
        for number, source in enumerate(("L-1", "L-2", "L-1 both", "role", "role + L-1", "T-1")):
            points = [
                (row["layer"], row["explained"])
                for row in found["rows"]
                if (row["target"], row["source"]) == (role, source)
            ]
            if points:
                panel.plot(*zip(*points, strict=True), label=source, **_look(number))
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        _tidy(panel)
    panels[0].set_ylabel("explained variance")
    panels[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), title="predicted from")
    length, held = found["settings"]["length"], found["settings"]["held_out"]
    figure.suptitle(f"{found['model']['id']}, {held} held-out sequences of {length} tokens", fontsize=9, color="0.35")
    return _png(figure)


def query_deviation(layers: Sequence[Mapping[str, Any]], where: str) -> bytes:
    """How far held-out queries stick out of their calibrated subspace: by its rank (the paper's figure 2), for some
    layers, and by layer, for some ranks.

    layers   of an artifact's fit
    """
    curves = {n: row["key"]["query_deviation"] for n, row in enumerate(layers) if "query_deviation" in row["key"]}
    size = len(next(iter(curves.values())))
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
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
    right.set_xlabel("layer")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (left, right):
        axis.set_ylim(0, 1.03)
        axis.legend(frameon=False, fontsize=9)
        _tidy(axis)
    figure.suptitle(where, fontsize=9, color="0.35")
    return _png(figure)


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)], **STYLE}


def _tidy(axis: Axes, grid: str = "both") -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.9", linewidth=0.8)  # type: ignore[arg-type]
    axis.set_axisbelow(True)


def _legend(figure: Figure, axes: Sequence[Axes], records: Sequence[Mapping[str, Any]]) -> None:
    handles, labels = axes[1].get_legend_handles_labels()
    if handles:
        columns = min(4, len(records))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _where(records: Sequence[Mapping[str, Any]]) -> str:
    """Model and its size, text and windows, in a line."""
    given = records[0]["protocol"]
    model, text = given["model"], given["text"]
    return (
        f"{model['id']} ({size_of(model['parameters'])} parameters), {given['windows']} held-out windows of "
        f"{given['length']} tokens, text: {text['source']}"
    )


def size_of(parameters: int) -> str:
    """4.1M, 7.6B: a number of parameters as people say it."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, metadata={"Software": None})
    return stream.getvalue()
