"""Draw what was answered: accuracy by depth and length, a row of panels a recipe and protocol, a column a task.

The bytes of a PNG; the same records give the same picture.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from kvq_calib.report import frame
from kvq_calib.report.captions import where
from kvq_runtime.registry.measured import SPOKEN, Cell, TasksRecord

Records = Sequence[TasksRecord]
COLOURS = "cividis"  # of Nuñez, Anderton and Renslow, 2018: read alike with any kind of colour vision
DARK = 0.55  # numbers on cells below are light
LIGHT, INK = "#fdfdfd", "#020202"  # on cells, whose colours are the same in the light and in the dark


@frame.picture
def heat(records: Records) -> Figure:
    """The records of `tasks.evaluate`; the 16-bit model has one row, since its answers do not depend on a protocol."""
    asked = records[0].protocol
    figure = grid(list(_rows(records)), asked.tasks, asked.lengths, asked.depths)
    texts = "a text" if asked.samples == 1 else f"{asked.samples} texts"
    frame.caption(
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
            place = f"{frame.plain(lengths[column])} tokens, depth {frame.plain(depths[row])}"
            frame.say(text, f"{place}: {share:.0%}")
    axis.set_xticks(np.arange(len(lengths)) + 0.5, [frame.plain(length) for length in lengths], fontsize=8)
    axis.set_yticks(np.arange(len(depths)) + 0.5, [frame.plain(depth) for depth in depths], fontsize=8)
    axis.spines[:].set_visible(False)
    return mesh
