"""Show what was answered to tasks, out of evaluation records: rows of tables, a card's section, a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from kvq_calib.report import looks as draw
from kvq_calib.report.tables import in_bold, markdown_table, spread, where
from kvq_runtime.registry.card import TASKS
from kvq_runtime.registry.measured import SPOKEN, Answer, Asked, Cell, Record, TasksRecord, of_tasks

Records = Sequence[TasksRecord]
COLOURS = "cividis"  # of Nuñez, Anderton and Renslow, 2018: read alike with any kind of colour vision
DARK = 0.55  # numbers on cells below are light
LIGHT, INK = "#fdfdfd", "#020202"  # on cells, whose colours are the same in the light and in the dark


def rows(records: Records) -> list[dict[str, Any]]:
    """Rows of a table: a recipe and protocol each, with each task's figures, a column a metric, and standard errors."""
    found = []
    for one in records:
        for name, part in one.result.protocols.items():
            bits_held = one.result.bits.get("asymptotic", 16.0)
            row: dict[str, Any] = {"recipe": one.name, "bits": bits_held, "protocol": SPOKEN[name]}
            for answer in (answer for answer in one.answers() if answer.protocol == name and answer.reason is None):
                row[_head(answer)] = cell(answer.value, answer.se)
            found.append(row | {"decoded": _decoded(part)})
    return found


def notes(records: Records) -> list[str]:
    """Return why tasks have no figures: a sentence for each recipe and task."""
    some = ((one.name, answer) for one in records for answer in one.answers())
    return [f"{name}: {answer.reason}\n" for name, answer in some if answer.task and answer.reason is not None]


def _head(answer: Answer) -> str:
    """The name of a column: the task and, where it is not plain accuracy, the metric."""
    metric = answer.metric.removesuffix(",none")
    return answer.task if metric == "accuracy" else f"{answer.task} {metric}"


def cell(value: float | None, error: float | None = None) -> str:
    """A share in per cent, with its standard error; a metric that is none, such as a perplexity, as it is."""
    if value is None:
        return ""
    return spread(f"{value:.1%}", error, ".1%") if 0 <= value <= 1 else spread(f"{value:.4g}", error, ".2g")


def _decoded(part: Asked) -> str:
    """Write the share of the reads that was decoded, by length or by task; or why nothing was measured."""
    if part.reason is not None:
        return part.reason
    shares = [f"{share:.0%} of {length}" for length, share in part.decoded.items()]
    shares += [
        f"{one['decoded']:.0%} of {task}, {one['read_encoded']} of {one['requests']} requests"
        for task, one in part.through_the_cache.items()
    ]
    return ", ".join(shares)


def answers(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a record, protocol, task and metric: its value, standard error and texts, the 16-bit model's value, and
    cells by length and depth."""
    return [
        {
            **{name: getattr(one, name) for name in ("protocol", "task", "metric", "value", "se", "texts")},
            "of_16_bit": one.reference,
            "cells": [{"length": cell.length, "depth": cell.depth, "accuracy": cell.accuracy}
                      for cell in record.result.protocols[one.protocol].cells if cell.task == one.task],
        }
        for record in of_tasks(records) for one in record.answers() if one.value is not None
    ]  # fmt: skip


def sections(records: Sequence[Record]) -> list[str]:
    """The section of a card, if there are records of tasks."""
    found = of_tasks(records)
    return [f"{TASKS}\n\n" + "\n\n".join(map(_section, found))] if found else []


def _section(record: TasksRecord) -> str:
    """Write one record: how the tasks were asked, then a row a task, metric and protocol, beside the 16-bit model."""
    rows = []
    for answer in record.answers():
        if answer.reason is not None:
            rows.append({"task": answer.task or "all", "16 bit": answer.reason})
            continue
        rows.append({
            "task": _head(answer),
            "16 bit": None if answer.reference is None else cell(answer.reference),
            record.name: cell(answer.value, answer.se),
            "texts": answer.texts,
            "protocol": SPOKEN[answer.protocol],
        })  # fmt: skip
    given = record.protocol
    by = f"asked by lm-eval {given.lm_eval}" if given.name == "lm-eval" else "kvq's own texts"
    of = f", the first {given.limit} examples" if given.limit else ""
    with_examples = "" if given.num_fewshot is None else f", {given.num_fewshot} worked examples"
    bits = record.result.bits["asymptotic"]
    said = (
        f"{in_bold(given.model)}; {by}{of}{with_examples}, through the cache of {bits:.3g} bits. ± is a standard error."
    )
    return f"{said}\n\n{markdown_table(rows)}"


@draw.picture
def heat(records: Records) -> Figure:
    """The records of `tasks.evaluate`; the 16-bit model has one row, since its answers do not depend on a protocol."""
    asked = records[0].protocol
    figure = grid(list(_rows(records)), asked.tasks, asked.lengths, asked.depths)
    texts = "a text" if asked.samples == 1 else f"{asked.samples} texts"
    draw.caption(
        figure,
        f"{where(asked.model)}. Right answers in per cent, by the place of what is asked for and by length, of {texts} "
        "each (--json has standard errors). In use: question and answer read the cache. Full encode: every token but "
        "the sinks is encoded before it is read.",
    )
    return figure


def grid(
    rows: Sequence[tuple[str, Sequence[Cell] | str]], names: Sequence[str], lengths: Sequence[float],
    depths: Sequence[float],
) -> Figure:  # fmt: skip
    """A row of panels for each title and its cells, or the reason why there are none, a column a task."""
    wide, high = max(1.5, 0.62 * len(lengths) + 0.5), max(1.1, 0.26 * len(depths) + 0.55)
    figure = Figure(figsize=(3.4 + wide * len(names), 1.3 + high * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    mesh = None
    for axes, (title, cells) in zip(panels, rows, strict=True):
        axes[0].set_ylabel(f"{title}\ndepth", fontsize=8.5, rotation=0, ha="right", va="center")
        if isinstance(cells, str):
            for axis in axes:
                axis.set(xticks=[], yticks=[])
                axis.spines[:].set_visible(False)
            axes[0].annotate(cells, (0.02, 0.5), xycoords="axes fraction", va="center", fontsize=8)
            continue
        for axis, task in zip(axes, names, strict=True):
            mesh = _panel(axis, [cell for cell in cells if cell.task == task], lengths, depths)
            axis.tick_params(length=0, labelleft=axis is axes[0])
    for axis, task in zip(panels[0], names, strict=True):
        axis.set_title(task, fontsize=9.5)
    for axis in panels[-1]:
        axis.set_xlabel("tokens of a text", fontsize=8.5)
    if mesh is not None:
        _scale(figure, panels.ravel().tolist())
    return figure


def _scale(figure: Figure, axes: list[Axes]) -> None:
    """Draw the scale of the colours, in ten steps."""
    steps = ListedColormap(colormaps[COLOURS](np.linspace(0.05, 0.95, 10)))
    given = ScalarMappable(BoundaryNorm(np.linspace(0, 1, 11), 10), steps)
    figure.colorbar(given, ax=axes, label="right answers", shrink=0.8, aspect=30, ticks=np.linspace(0, 1, 6))


def _rows(records: Records):
    """(title, cells or why there are none) of each recipe and protocol; of the 16-bit model of one."""
    for number, one in enumerate(records):
        for name, part in one.result.protocols.items():
            found = part.cells if part.reason is None else part.reason
            yield (one.name if number == 0 else f"{one.name}\n{SPOKEN[name]}"), found
            if number == 0:
                break


def _panel(axis: Axes, cells: Sequence[Cell], lengths: Sequence[float], depths: Sequence[float]):
    """A task's cells, the number of per cent in each; a cell that was not measured is empty."""
    shares = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        shares[depths.index(cell.depth), lengths.index(cell.length)] = cell.accuracy
    mesh = axis.pcolormesh(np.ma.masked_invalid(shares), cmap=COLOURS, vmin=0, vmax=1, edgecolors="face")
    axis.invert_yaxis()
    for (row, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            ink = LIGHT if share < DARK else INK
            text = axis.text(
                column + 0.5, row + 0.5, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color=ink
            )
            place = f"{draw.plain(lengths[column])} tokens, depth {draw.plain(depths[row])}"
            draw.say(text, f"{place}: {share:.0%}")
    axis.set_xticks(np.arange(len(lengths)) + 0.5, [draw.plain(length) for length in lengths], fontsize=8)
    axis.set_yticks(np.arange(len(depths)) + 0.5, [draw.plain(depth) for depth in depths], fontsize=8)
    axis.spines[:].set_visible(False)
    return mesh
