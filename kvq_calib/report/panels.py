"""Draw costs against bits into axes: a marker a recipe with its name, whiskers, the frontier, the 16-bit model.

Points are read from records. A panel of them is drawn in two steps: `scatter` draws markers and sets the limits; once
the figure's layout is final, `name` writes names where nothing is in their way: each takes the nearest free place
around its point, those that come first the nearer ones, and one that is not close to its point has a thin line to it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter

from kvq_calib.report.looks import INK, Look, canvas, family, log_scale, looks, nothing, plain, say, symlog_scale, tidy
from kvq_calib.report.tables import attention_error, kl_error, standard_error
from kvq_runtime.registry.measured import Figures, TextRecord

# what README.md recommends where bits may differ by layer: marked where it was measured
RECOMMENDED = ("auto-2.1bit",)
KL, PERPLEXITY, ATTENTION = "kl", "relative", "attention"
LINEAR = 0.1  # percent of perplexity, below which differences are chance and the axis is linear
EXACT = 16.0  # bits of a cache that is not quantized, which is the line at 0
RING = 15.0  # points: how wide a ring is
DECADE = 20.0  # the least span of a logarithmic axis, so that small differences look small
LEAST = 1e-9  # a cost below is that of an exact cache: rounding of sums
GAP = 2.5  # points left free around a mark: a name's halo reaches as far
DISTANCES = (6.5, 8.5, 11.0, 14.0, 18.0, 25.0, 34.0, 45.0, 60.0, 80.0, 105.0, 135.0, 170.0)  # points, marker to name
LINE_FROM = 12.0  # points: from here on a name needs a line
DIRECTIONS = [(math.cos(angle), math.sin(angle)) for angle in np.arange(16) * math.tau / 16]
HALO = withStroke(linewidth=1.8, foreground="white")  # where a name lies over a line, it can be read
TITLES = {
    KL: "KL divergence from the 16-bit model, nats per token",
    PERPLEXITY: "perplexity above that of the 16-bit model",
    ATTENTION: "attention output, relative squared error",
}

_UNITS = {KL: "nats", PERPLEXITY: "%", ATTENTION: "of its energy"}


@dataclass(frozen=True, eq=False)
class Point:
    """A recipe's cost at its bits; another with the same figures is another point.

    spread   standard error of the cost over windows; None: not known
    tail     bits of a whole cache of 4096 tokens; None: not asked for
    here     whether it is what the picture is about
    """

    recipe: str
    name: str
    bits: float
    cost: float
    spread: float | None = None
    tail: float | None = None
    here: bool = False


def points(records: Sequence[TextRecord], measure: str, protocol: str, tail: str = "") -> list[Point]:
    """The points of one panel, in the order of the records; those without figures are left out.

    measure   KL in nats; PERPLEXITY above that of 16 bit, in percent; ATTENTION, the relative error of its output
    tail      which bits of the record a line to the right ends at
    """
    found = []
    for record in records:
        part, bits = record.figures(protocol), record.result.bits
        if part is None:
            continue
        cost, spread = _cost(record, part, measure, protocol)
        if cost is not None:
            end = bits[tail] if tail else None
            found.append(Point(record.result.recipe, record.name, bits["asymptotic"], cost, spread, end))
    return found


def _cost(record: TextRecord, part: Figures, measure: str, protocol: str) -> tuple[float | None, float | None]:
    """The cost and its standard error."""
    if measure == ATTENTION:
        return attention_error(record, protocol), None
    if measure == KL:
        return part.kl, kl_error(part)
    spread = standard_error(part)
    return 100 * part.relative, None if spread is None else 100 * spread


def frontier(given: Sequence[Point]) -> list[Point]:
    """The points that no other one beats, by ascending bits: another has more bits, or costs more.

    Of points with equal bits and cost the first counts.
    """
    found: list[Point] = []
    for one in sorted(given, key=lambda one: (one.bits, one.cost)):
        if not found or one.cost < found[-1].cost:
            found.append(one)
    return found


def not_drawn(names: Iterable[str]) -> str:
    """A sentence on what has no divergence, and so no mark; empty where there is no such thing."""
    said = ", ".join(dict.fromkeys(names))
    return f"Not drawn, for their divergence was not measured: {said}." if said else ""


def recommended(given: Sequence[Point]) -> Point | None:
    """The point of our recommendation, if it was measured."""
    known = {one.recipe: one for one in given}
    return next((known[name] for name in RECOMMENDED if name in known), None)


@dataclass(frozen=True)
class Panel:
    """Axes with their points drawn.

    rings      points that have one
    left_out   names of exact caches, which are no points: they cost nothing
    zero       whether 16 bit is a line at 0
    """

    axis: Axes
    points: Sequence[Point]
    front: Sequence[Point]
    rings: Sequence[Point]
    looks: Mapping[Point, Look]
    left_out: Sequence[str]
    zero: bool


def scatter(
    axis: Axes, given: Sequence[Point], measure: str, title: str = "", front: bool = True, beside: Sequence[Point] = ()
) -> Panel:
    """Draw points of one measure, set scales and limits, and the frontier if it is asked for.

    beside   points of other panels, for which there is room too: panels with the same of these have the same axes
    """
    log = measure != PERPLEXITY
    drawn = [one for one in given if one.bits < EXACT and (not log or one.cost > LEAST)]
    beside = [one for one in beside if one.bits < EXACT and (not log or one.cost > LEAST)]
    chosen = dict(zip(drawn, looks([one.recipe for one in drawn]), strict=True))
    _limits(axis, [*drawn, *beside], log)
    if not log:
        axis.axhline(0, color="0.35", linewidth=1, linestyle="--", zorder=1)
    best = frontier(drawn) if front and len(drawn) > 1 else []
    if best:
        edge = axis.get_xlim()[1]
        axis.plot([*(one.bits for one in best), edge], [*(one.cost for one in best), best[-1].cost], color="0.72",
                  linewidth=3.2, alpha=0.7, drawstyle="steps-post", solid_capstyle="butt", zorder=1.5,
                  label="frontier")  # fmt: skip
    for one, look in chosen.items():
        if one.tail is not None:
            axis.plot([one.bits, one.tail], [one.cost, one.cost], color=look.colour, linewidth=1, alpha=0.45, zorder=2)
            axis.plot(one.tail, one.cost, "|", color=look.colour, markersize=7, alpha=0.8, zorder=2)
        if one.spread is not None:
            low = min(one.spread, 0.9 * one.cost) if log else one.spread
            axis.errorbar(one.bits, one.cost, [[low], [one.spread]], color=look.colour, capsize=2, linewidth=0.9,
                          alpha=0.6, linestyle="none", zorder=2)  # fmt: skip
        (mark,) = axis.plot(one.bits, one.cost, zorder=3, **look.point)
        spread = f" ± {one.spread:.2g}" if one.spread is not None else ""
        say(mark, f"{one.name}: {one.bits:.3g} bits, {one.cost:.3g}{spread} {_UNITS[measure]}")
    rings = _ringed(drawn) if front else []
    for one in rings:
        axis.plot(one.bits, one.cost, "o", markersize=RING, color="none", markeredgecolor="black", markeredgewidth=1.4,
                  zorder=2.8)  # fmt: skip
    axis.set_title(title, loc="left", fontsize=10)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_xlabel("bits per key or value element, asymptotic", fontsize=9)
    tidy(axis)
    return Panel(
        axis, drawn, best, rings, chosen, [one.name for one in given if one not in drawn], bool(drawn) and not log
    )


def _ringed(given: Sequence[Point]) -> list[Point]:
    """Return the picture's own points, and the recommended one."""
    marked = recommended(given)
    return [*(one for one in given if one.here), *([marked] if marked and not marked.here else [])]


def _limits(axis: Axes, drawn: Sequence[Point], log: bool) -> None:
    """Room for all points, their whiskers and some names."""
    if not drawn:
        nothing(axis, "nothing to draw")
        axis.set(xticks=[], yticks=[])
        return
    right = max(one.tail or one.bits for one in drawn)
    left = min(one.bits for one in drawn)
    room = max(0.12 * (right - left), 0.35)
    axis.set_xlim(max(0.0, left - room), right + room)
    tops = [one.cost + (one.spread or 0) for one in drawn]
    feet = [one.cost - (one.spread or 0) for one in drawn]
    if log:
        feet = [max(foot, 0.5 * one.cost) for foot, one in zip(feet, drawn, strict=True)]
        span = max(tops) / min(feet)
        reach = max(1.6, span**0.08, (DECADE / span) ** 0.5)
        log_scale(axis, min(feet) / reach, max(tops) * reach)
        return
    low, high = min(0.0, *feet), max(LINEAR / 2, *tops)
    symlog_scale(axis, low - max(0.06 * min(high - low, 1.0), -0.4 * low, LINEAR / 2), high * 1.6, LINEAR)


def name(panel: Panel, which: Sequence[Point] | None = None, size: float = 8.0, others: bool = True) -> None:
    """Write the names of the points. The figure's layout must be final.

    which    points that are named if there is a place at all. None: all are
    others   whether the others are named too, where there is a place right beside them
    """
    ringed = _ringed(panel.points)
    first = [*ringed, *panel.front]
    must = panel.points if which is None else which
    wanted = dict.fromkeys(one for one in [*first, *panel.points] if others or one in must)
    roles = {one: " (this version)" if one.here else " (recommended)" for one in ringed}
    labels = [
        Label(one.bits, one.cost, one.name + roles.get(one, ""), panel.looks[one].ink, one in first, one not in must)
        for one in sorted(wanted, key=lambda one: one not in must)
    ]
    if panel.zero:
        labels.insert(0, Label(panel.axis.get_xlim()[1], 0.0, "16 bit", INK))
    lines = [*_dense(panel), *(at for one in panel.points for at in _whiskers(one))]
    place(panel.axis, labels, [(one.bits, one.cost, _reach(panel, one)) for one in panel.points], lines, size)


def _reach(panel: Panel, one: Point) -> float:
    """The points that its mark reaches from its middle: the marker, or the ring around it."""
    return (RING + 1.4 if one in panel.rings else panel.looks[one].point["markersize"]) / 2


def speakers(panel: Panel) -> list[Point]:
    """The points to name where there are too many for all: those of the frontier, ours, and of each other family the
    one that comes nearest to the frontier."""
    best = dict.fromkeys([*panel.front, *_ringed(panel.points)])
    heard = {family(one.recipe) for one in best}
    nearest: dict[str, tuple[float, Point]] = {}
    for one in panel.points:
        floor = min((other.cost for other in panel.front if other.bits <= one.bits), default=one.cost)
        gap, kind = math.log(one.cost / floor) if floor > 0 and one.cost > 0 else 0.0, family(one.recipe)
        if kind not in heard and (kind not in nearest or gap < nearest[kind][0]):
            nearest[kind] = gap, one
    return [*best, *(one for _, one in nearest.values())]


def _dense(panel: Panel) -> list[tuple[float, float]]:
    """Places along the frontier's stairs and the line of 16 bit."""
    left, edge = panel.axis.get_xlim()
    found: list[tuple[float, float]] = [(x, 0.0) for x in np.linspace(left, edge, 60)] if panel.zero else []
    for one, after in zip_longest(panel.front, panel.front[1:]):
        right = edge if after is None else after.bits
        found += [(x, one.cost) for x in np.linspace(one.bits, right, 40)]
        if after is not None and after.cost > 0:
            found += [(right, y) for y in np.geomspace(one.cost, after.cost, 40)]
    return found


def _whiskers(one: Point) -> list[tuple[float, float]]:
    spread = one.spread or 0.0
    ends = [(one.bits, one.cost + share * spread) for share in np.linspace(-1, 1, 12) if one.cost + share * spread > 0]
    return ends + ([] if one.tail is None else [(x, one.cost) for x in np.linspace(one.bits, one.tail, 20)])


# ---- names beside points ---------------------------------------------------------------------------------------------


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
