"""Write names beside points so that no name covers another name or a marker, or leaves the axes.

Each name takes the nearest free place around its point, those that come first the nearer ones; a name that is not close
to its point has a thin line to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation

from kvq_calib.report.looks import canvas

GAP = 2.5  # points left free around a mark: a name's halo reaches as far
DISTANCES = (6.5, 8.5, 11.0, 14.0, 18.0, 25.0, 34.0, 45.0, 60.0, 80.0, 105.0, 135.0, 170.0)  # points, marker to name
LINE_FROM = 12.0  # points: from here on a name needs a line
DIRECTIONS = [(math.cos(angle), math.sin(angle)) for angle in np.arange(16) * math.tau / 16]
HALO = withStroke(linewidth=1.8, foreground="white")  # where a name lies over a line, it can be read


@dataclass(frozen=True)
class Label:
    """A name at a point in data coordinates.

    near   left out unless it can stand right beside its point
    """

    x: float
    y: float
    text: str
    colour: str = "black"
    bold: bool = False
    near: bool = False


def place(
    axis: Axes,
    labels: Sequence[Label],
    marks: Sequence[tuple[float, float, float]],
    lines: Sequence[tuple[float, float]] = (),
    size: float = 8.0,
) -> list[Annotation]:
    """Write the names, and return what was written, in their order; a name that has no free place is left out.

    marks   what stays uncovered: places, and how far a mark reaches from each, in points
    lines   places, dense along lines, that a name covers only where it must
    The layout must not change afterwards: axes and figure have their final size and limits.
    """
    if not labels:
        return []
    renderer = canvas(axis.get_figure(root=True)).get_renderer()  # type: ignore[union-attr]
    unit = axis.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    frame = axis.get_window_extent(renderer)
    bounds = np.array([frame.x0, frame.y0, frame.x1, frame.y1])
    markers = _pixels(axis, [mark[:2] for mark in marks])
    rooms = unit * (np.array([mark[2] for mark in marks]).reshape(-1, 1) + GAP)
    soft = _pixels(axis, lines)
    boxes, tails, written = np.empty((0, 4)), np.empty((0, 2)), []
    for label in labels:
        (centre,) = _pixels(axis, [(label.x, label.y)])
        weight = "bold" if label.bold else "normal"
        probe = axis.text(0, 0, label.text, fontsize=size, fontweight=weight)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        reach = LINE_FROM if label.near else math.inf
        size_WH = np.array([extent.width, extent.height])
        found = _best(reach, centre, size_WH, unit, bounds, markers, rooms, soft, boxes, tails)
        if found is None:
            continue
        box, tail = found
        boxes, tails = np.vstack([boxes, box]), np.vstack([tails, tail])
        at = ((box[0] + box[2]) / 2 - centre[0], (box[1] + box[3]) / 2 - centre[1])
        if len(tail):
            end = (tail[-1] - centre) / unit
            axis.annotate("", (label.x, label.y), tuple(end), textcoords="offset points", zorder=2.2, arrowprops={
                "arrowstyle": "-", "color": label.colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3
            })  # fmt: skip
        written.append(axis.annotate(
            label.text, (label.x, label.y), (at[0] / unit, at[1] / unit), textcoords="offset points", ha="center",
            va="center", fontsize=size, fontweight=weight, color=label.colour, zorder=4, path_effects=[HALO],
        ))  # fmt: skip
    return written


def _pixels(axis: Axes, places: Sequence[tuple[float, float]]) -> np.ndarray:
    return axis.transData.transform(np.array(places, dtype=float).reshape(-1, 2))


def _best(reach, centre, size_WH, unit, bounds, markers, rooms, soft, boxes, tails):
    """The nearest free box [x0, y0, x1, y1] and the places of its line, in pixels; None where there is none."""
    best, least = None, math.inf
    for distance in DISTANCES:
        if distance > min(least, reach):
            break
        for across, up in DIRECTIONS:
            # the side that faces the point is at the distance: a name to the right begins there
            middle = centre + np.array([across, up]) * (distance * unit + size_WH / 2)
            box = np.concatenate([middle - size_WH / 2, middle + size_WH / 2])
            tail = _tail(centre, box) if distance >= LINE_FROM else np.empty((0, 2))
            if not _free(box, tail, bounds, markers, rooms, boxes, tails):
                continue
            crossed = _inside(box, soft, 1.0).sum() * 3.0 + _near(tail, markers, 3 * unit) * 4
            crossed += 15 * _nearer(box, centre, markers)
            cost = distance + crossed - 0.5 * abs(across) - (0.3 if up > 0 else 0)
            if cost < least:
                best, least = (box, tail), cost
    return best


def _tail(centre, box):
    """Places along the straight line from a point to the nearest place of a box."""
    end = np.clip(centre, box[:2], box[2:])
    return centre + (end - centre) * np.linspace(0.25, 1, 16)[:, None]


def _free(box, tail, bounds, markers, rooms, boxes, tails) -> bool:
    if (box[:2] < bounds[:2] + 1).any() or (box[2:] > bounds[2:] - 1).any():
        return False
    if _inside(box, markers, rooms).any() or _inside(box, tails, 1.0).any():
        return False
    apart = (boxes[:, 0] > box[2] + 2) | (boxes[:, 2] < box[0] - 2) | (boxes[:, 1] > box[3]) | (boxes[:, 3] < box[1])
    if not apart.all():
        return False
    return not any(_inside(one, tail, 1.0).any() for one in boxes)


def _inside(box, places, room):
    return ((places > box[:2] - room) & (places < box[2:] + room)).all(axis=1)


def _nearer(box, centre, markers) -> bool:
    """True if another marker is nearer to a box than its own point is: a reader would take the name for its."""
    gaps = np.hypot(*(np.clip(markers, box[:2], box[2:]) - markers).T)
    others = np.hypot(*(markers - centre).T) > 1
    own = np.hypot(*(np.clip(centre, box[:2], box[2:]) - centre))
    return bool((gaps[others] < 1.1 * own).any())


def _near(tail, markers, room) -> int:
    """Count the markers that a line runs over."""
    if not len(tail) or not len(markers):
        return 0
    gaps = np.abs(tail[4:, None] - markers[None]).max(axis=2).min(axis=0)
    return int((gaps < room).sum())
